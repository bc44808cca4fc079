"""What a region takes as one kernel, predicted before any code is written.

    time = start · phases + longer + (1 − overlap) · shorter    of moving bytes, and computing

Bytes: each tensor that the kernel reads or writes once, at the speed at which a copy of as many
bytes was measured (what fits into the caches is faster). Computing: matrix products by tiles and
waves, everything else by the number of vector instructions that its expressions need. The
parameters (`Costs`) are measured on the device; what is constant here describes the code that is
generated, not a device.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, exp, inf, log

from onchip.analysis.demand import recompute_factor
from onchip.analysis.kind import Kind, contraction, node_kind
from onchip.analysis.roofline import Ceilings, Costs, launch_us
from onchip.analysis.traffic import Ledger
from onchip.analysis.work import Dependence, bindings, values
from onchip.ir.dtype import DType
from onchip.ir.expr import Call, Expr, Load, Reduce, Stream, Tensor, loads, mentioned, reduces
from onchip.ir.functions import CASTS, TRANSCENDENTAL
from onchip.ir.graph import Node

# Vector instructions of a function that is a sequence of others, without and with a unit for
# special functions: exp is 24 in the C++ kernels (docs/design.md); on a GPU a quarter-rate
# instruction, its scaling and range check. Divisions and roots are iterated or slow.
DEAR = {False: 24.0, True: 8.0}
DIVISION = {False: 5.0, True: 6.0}
_DIVISIONS = frozenset(
    ("div", "sqrt", "rsqrt", "reciprocal", "floordiv", "mod", "fmod", "truncdiv")
)
# exps in one function
_SEVERAL = {"tanh": 1.3, "sigmoid": 1.3, "erf": 1.2, "pow": 2.5, "log1p": 1.3, "expm1": 1.3}

# (rows, columns) of results that one thread or program computes at once. A smaller tile reads
# its operands more often: below GPU_INTENSITY, results a row or column read, it is as much slower.
CPU_TILES = ((8, 32), (4, 16), (1, 16))
GPU_TILES = ((256, 128), (128, 128), (128, 64), (64, 64))
GPU_INTENSITY = 64.0
MOST_SPLITS = 8  # programs that share the K of one tile
# Elements of a tile along an axis on which windows overlap.
TILE = 8
# A fold of so many elements into fewer results than there are processors is handed out in chunks.
LARGE_FOLD = 1 << 15
# Elements from which on a CPU's kernel wakes its other threads, and a library's operator too.
PARALLEL = 1 << 15


@dataclass(frozen=True, slots=True)
class Product:
    """(m × k) · (k × n), `batches` of them, operands of type `dtype`. convolution: PyTorch's
    defaults let TF32 round its operands, and with few taps it may have a short form."""

    m: int
    n: int
    k: int
    batches: int
    dtype: DType
    convolution: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """What a region does as one kernel.

    nbytes      read and written in global memory
    operations  instructions of one lane, products left out
    products    matrix products
    elements    of the largest tensor in it: how much there is to hand out
    phases      parts of the kernel with a barrier (on a GPU a launch) between
    """

    nbytes: int
    operations: float = 0.0
    products: tuple[Product, ...] = ()
    elements: int = 0
    phases: int = 1


class Pricer:
    """Prices of one graph's regions on one device. Facts about an operator are worked out once.

    graph   launches are nodes of a CUDA graph
    """

    def __init__(self, ledger: Ledger, ceilings: Ceilings, graph: bool = True):
        self.ledger, self.ceilings, self.graph = ledger, ceilings, graph
        self._facts: dict[Node, _Facts] = {}
        self._calls: dict[Node, float] = {}

    def kernel_us(self, nodes: Iterable[Node]) -> float:
        """Microseconds of a region as one generated kernel; 0 if it launches nothing."""
        found = self.work(tuple(nodes))
        return predicted_us(found, self.ceilings, self.graph) if found is not None else 0.0

    def library_us(self, nodes: Iterable[Node]) -> float:
        """Microseconds of operators run one after the other as library calls."""
        return sum(self.call_us(n) for n in nodes)

    def call_us(self, node: Node) -> float:
        """Microseconds of one operator as a library call."""
        if node not in self._calls:
            self._calls[node] = self._call_us(node)
        return self._calls[node]

    def _call_us(self, node: Node) -> float:
        if self.ledger.is_free(node):
            return 0.0
        own, c = self._about(node), self.ceilings
        nbytes = self.ledger.operator(node).dram_bytes
        starts = c.launch_us if not c.gpu else launch_us(c, self.graph)
        return running_us(Work(nbytes, own.operations, own.products, own.elements), c) + starts

    def floor_us(self, nodes: Iterable[Node], fewer: float = 1.0) -> float:
        """What the region can't be faster than: its bytes at the speed of a copy, or its products'
        arithmetic at the device's rate, nothing computed twice, and a launch. fewer: by how much a
        short form of convolutions reduces their products."""
        work = [n for n in nodes if not self.ledger.is_free(n)]
        if not work:
            return 0.0
        c = self.ceilings
        compute = 0.0
        for p in (p for n in work for p in self._about(n).products):
            short = fewer if p.convolution else 1.0
            compute += 2.0 * p.m * p.n * p.k * p.batches / _rate(p, c) / 1e3 / short
        starts = min(launch_us(c, self.graph), costs_of(c).start_us)
        return max(moving_us(self.ledger.kernel(work).dram_bytes, c), compute) + starts

    def work(self, nodes: Iterable[Node]) -> Work | None:
        """What a region does as one kernel; None if it launches nothing."""
        work = [n for n in nodes if not self.ledger.is_free(n)]
        if not work:
            return None
        operations, products, elements, phases = 0.0, [], 0, 1
        again = self._repeats(work)
        for n in work:
            own = self._about(n)
            operations += own.operations * again.get(n, 1.0)
            products += [_taller(x, again.get(n, 1.0)) for x in own.products]
            elements = max(elements, own.elements)
            phases += own.folded_to < costs_of(self.ceilings).processors
        nbytes = self.ledger.kernel(work).dram_bytes
        return Work(nbytes, operations, tuple(products), elements, phases)

    def _repeats(self, nodes: Sequence[Node]) -> dict[Node, float]:
        """How often each operator's elements are computed where overlapping windows of the same
        kernel read them, tile by tile. nodes: in an order of execution."""
        out: dict[Node, float] = {}
        maker = {t: n for n in nodes for t in n.results}
        for n in reversed(nodes):
            for t, factor in self._about(n).windows:
                p = maker.get(t)
                if p is not None and p is not n:
                    out[p] = max(out.get(p, 1.0), out.get(n, 1.0) * factor)
        return out

    def _about(self, node: Node) -> _Facts:
        if node not in self._facts:
            self._facts[node] = _facts_of(node, self.ceilings.gpu)
        return self._facts[node]


def costs_of(ceilings: Ceilings) -> Costs:
    """The model's parameters; those of a typical device where nothing was measured."""
    return ceilings.costs if ceilings.costs is not None else assumed(ceilings)


def assumed(ceilings: Ceilings) -> Costs:
    """Parameters for a device that is not there: a start is a launch, memory is as fast as the copy
    ceiling for any number of bytes, and a GPU of that rate has some 130 multiprocessors."""
    copied = ((1 << 20, (1 << 20) / ceilings.copy_gbs / 1e3),)
    if ceilings.gpu:
        return Costs(copied, launch_us(ceilings, True), 132, 128.0, 0.8)
    return Costs(copied, ceilings.launch_us, 1, 16.0, 0.5)


def predicted_us(work: Work, ceilings: Ceilings, graph: bool = True) -> float:
    """Microseconds of a generated kernel, its start included."""
    starts = launch_us(ceilings, graph) if ceilings.gpu else costs_of(ceilings).start_us
    if not ceilings.gpu and work.elements < PARALLEL and not work.products:
        starts = min(starts, ceilings.launch_us)
    return running_us(work, ceilings) + starts * work.phases


def running_us(work: Work, ceilings: Ceilings) -> float:
    """Microseconds once it runs."""
    memory, compute = moving_us(work.nbytes, ceilings), computing_us(work, ceilings)
    hidden = costs_of(ceilings).overlap * min(memory, compute)
    return memory + compute - hidden


def moving_us(nbytes: float, ceilings: Ceilings) -> float:
    """Microseconds that a copy takes which reads and writes `nbytes` together: between two measured
    sizes by interpolation of the logarithms, beyond them in proportion."""
    points = costs_of(ceilings).copied
    if nbytes <= 0:
        return 0.0
    i = bisect_left([b for b, _ in points], nbytes)
    if i == 0 or i == len(points):
        b, us = points[0 if i == 0 else -1]
        return us * nbytes / b
    (a, s), (b, t) = points[i - 1], points[i]
    share = log(nbytes / a) / log(b / a)
    return exp(log(s) + share * (log(t) - log(s)))


def computing_us(work: Work, ceilings: Ceilings) -> float:
    """Microseconds of the arithmetic."""
    rate = ceilings.rate(DType.F32)
    # a rate counts a multiply-add as two
    scalar = work.operations / (rate / 2) / 1e3
    if not ceilings.gpu and work.elements < PARALLEL:
        scalar *= costs_of(ceilings).processors  # one thread does it
    products = sum(product_us(p, ceilings) for p in work.products)
    if not ceilings.gpu:
        return products + scalar
    hidden = costs_of(ceilings).overlap * min(products, scalar)
    return products + scalar - hidden


def _rate(p: Product, ceilings: Ceilings) -> float:
    """GFLOP/s. float32 on a GPU is IEEE's, or three TF32 products for one."""
    rate = ceilings.rate(p.dtype, True, p.convolution)
    if ceilings.gpu and p.dtype is DType.F32 and not p.convolution:
        rate = max(rate, ceilings.rate(p.dtype, True, True) / 3)
    return rate


def product_us(p: Product, ceilings: Ceilings) -> float:
    """Microseconds of a matrix product: tiles handed out in waves, each as long as its K and what
    starting and ending a tile takes."""
    costs = costs_of(ceilings)
    one = _rate(p, ceilings) * 1e3 / costs.processors  # FLOP/µs of one processor
    best = float("inf")
    for rows, columns in GPU_TILES if ceilings.gpu else CPU_TILES:
        for tm, tn in {(rows, columns), (columns, rows)} if ceilings.gpu else ((rows, columns),):
            slow = 1.0
            if ceilings.gpu:
                slow = max(1.0, GPU_INTENSITY * (1 / tm + 1 / tn))
            tiles = ceil(p.m / tm) * ceil(p.n / tn) * p.batches
            for splits in _splits(p, ceilings.gpu):
                waves = ceil(tiles * splits / costs.processors)
                steps = ceil(p.k / splits) * slow + costs.fill
                best = min(best, waves * 2.0 * tm * tn * steps / one)
    return best


def _splits(p: Product, gpu: bool) -> Sequence[int]:
    return [s for s in (1, 2, 4, MOST_SPLITS) if s == 1 or (gpu and p.k // s >= 64)]


# ---- facts about operators ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Facts:
    """One operator: instructions of one lane outside of products, the products, elements of the
    largest tensor; folded_to: results of a fold that is large (else infinity); windows: what it
    reads, and how often tiles compute each element of it."""

    operations: float
    products: tuple[Product, ...]
    elements: int
    folded_to: float
    windows: tuple[tuple[Tensor, float], ...]


def _facts_of(node: Node, gpu: bool) -> _Facts:
    operations, products, windows = 0.0, [], []
    for t in node.tensors:
        if t.body is None:
            continue
        found = contraction(t)
        if found is not None:
            size = (found.m, found.n, found.k, found.batches)
            products.append(Product(*size, found.lhs.src.dtype, "conv" in node.op))
        operations += _operations(t, found.reduce if found else None, gpu)
        windows += [(s, _overlap(t, s)) for s in dict.fromkeys(ld.src for ld in loads(t.body))]
    elements = max((t.numel for t in (*node.inputs, *node.tensors, *node.results)), default=0)
    large = node_kind(node) is Kind.REDUCTION and elements >= LARGE_FOLD
    folded_to = max((t.numel for t in node.results), default=1) if large else inf
    return _Facts(operations, tuple(products), elements, folded_to, tuple(windows))


def _operations(t: Tensor, product: Expr | None, gpu: bool) -> float:
    """Instructions of one lane to compute a tensor, the product left out."""
    assert t.body is not None
    depends, total = Dependence(t.body), 0.0
    free = _multiplied(t) | ({*values(product)} if product is not None else set())
    for e in values(t.body):
        if e in free:
            continue
        match e:
            case Call(fn=fn):
                total += _instructions(fn, gpu) * bindings(depends.of(e))
            case Reduce(axes=axes, body=body):
                total += bindings(depends.of(body) | set(axes))
            case Stream():
                total += 4 * bindings(depends.of(e) | {e.axis})
            case Load(index=index):
                total += bindings({a for i in index for a in mentioned(i)})
    return total


def _multiplied(t: Tensor) -> set[Expr]:
    """Products that a fold adds up: one instruction with the addition."""
    found = reduces(t.body) if t.body is not None else []
    return {r.body for r in found if r.monoid == "sum" and getattr(r.body, "fn", "") == "mul"}


def _instructions(fn: str, gpu: bool) -> float:
    if fn in TRANSCENDENTAL:
        return DEAR[gpu] * _SEVERAL.get(fn, 1.0)
    if fn in _DIVISIONS:
        return DIVISION[gpu]
    return 0.5 if fn in CASTS else 1.0


# ---- recomputation -----------------------------------------------------------------------------


def _overlap(reader: Tensor, read: Tensor) -> float:
    """recompute_factor for tiles that are cut where windows move only."""
    moving = {
        a
        for ld in loads(reader.body)  # type: ignore[arg-type]
        if ld.src is read
        for i in ld.index
        if len(m := mentioned(i)) > 1
        for a in m
    }
    if not moving:
        return 1.0
    tile = [
        min(TILE, n) if a in moving else n for a, n in zip(reader.axes, reader.shape, strict=True)
    ]
    return recompute_factor(reader, read, tile)


def _taller(p: Product, factor: float) -> Product:
    """The product with so many times its rows."""
    return p if factor == 1.0 else replace(p, m=ceil(p.m * factor))
