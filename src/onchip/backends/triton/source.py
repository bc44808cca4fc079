"""What a generated Triton kernel is: text, launches, and the choices it was written with."""

from __future__ import annotations

from dataclasses import dataclass, field

from onchip.backends.nvidia.source import Launch, Workspace
from onchip.fusion.nest import Nest
from onchip.ir.expr import Tensor

Strides = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Options:
    """Choices that are tuned, and what the kernel is written for.

    lanes       consecutive tiles of the nest that one program computes side by side, as one
                dimension of its blocks
    warps       per program; stages: of software pipelining, in loops over K
    k_block     elements of K that one step of a product takes
    fold_block  elements of a block beyond which a fold walks its axes in a loop
    precision   of float32 products: "ieee", "tf32x3" (three TF32 products) or "tf32"
    stream      positions of the axis that one step of a walk takes (stream.py); 0: no walk
    product     the nest holds a matrix product, so that its choices count
    split       programs that share the K of one tile; the last one adds up what all have
    before      the choices of the phases before the nest, each in a function of its own
    packed      values of half types are kept as stored between two stages
    strip       the loop of the root along which the tile is computed element by element, so that
                windows share what they read (strips.py); chunk: elements of its last loop that are
                computed side by side, the rest one after the other (0: all)
    joined      all phases are one function: the programs of a row wait for each other between them
    cluster     those programs are a cluster, which has a barrier of its own
    waits       see Launch
    interpret   for Triton's interpreter, whose bfloat16 arithmetic is wrong: products of half
                types are computed in float32
    """

    lanes: int = 1
    warps: int = 4
    stages: int = 3
    k_block: int = 32
    fold_block: int = 1 << 14
    precision: str = "ieee"
    interpret: bool = False
    stream: int = 0
    product: bool = False
    split: int = 1
    before: tuple[Options, ...] = ()
    joined: bool = False
    cluster: bool = False
    waits: bool = False
    packed: bool = False
    strip: int | None = None
    chunk: int = 0

    @property
    def each(self) -> tuple[Options, ...]:
        """The choices of each phase."""
        return (*self.before, self)


@dataclass(frozen=True, eq=False, slots=True)
class Variant:
    """A nest and the choices to emit it with."""

    nest: Nest
    options: Options

    @property
    def label(self) -> str:
        """How it differs from others."""
        phases = zip(self.nest.phases, self.options.each, strict=False)
        if self.options.joined:
            how = "are a cluster" if self.options.cluster else "wait for each other"
            return f"programs of a row {how}, {_choices(self.nest, self.options)}"
        return "; then ".join(_choices(n, o) for n, o in phases)


def _choices(nest: Nest, o: Options) -> str:
    text = f"tile {'x'.join(map(str, nest.tile))}, {o.lanes} lanes, {o.warps} warps"
    text += ", packed" * o.packed
    if o.strip is not None:
        text += f", strips of {nest.tile[o.strip]}" + f" by {o.chunk} columns" * (o.chunk > 0)
    text += f", folds by {o.fold_block}" * (o.fold_block != Options().fold_block and not o.joined)
    if o.stream:
        return text + f", walked by {o.stream}, {o.stages} stages, {o.precision}"
    text += f", {o.k_block} of K, {o.stages} stages, {o.precision}" * o.product
    return text + f", K split in {o.split}" * (o.split > 1)


@dataclass(frozen=True, slots=True)
class Partial:
    """A parameter of a function for memory in which programs add up what each of them has."""

    name: str
    pointer: str
    memory: Workspace


@dataclass(frozen=True, eq=False, slots=True)
class TritonSource:
    """Generated text and how to run it: the launches, in order. The kernel's pointers are those of
    `inputs`, `outputs` and `workspace`, in this order; `pointers` are their types ("*fp32").

    laid_out: constants among the inputs that the kernel wants with other strides than they have, or
    `rounded` to TF32; inputs that are derived at load (these among them) come after the others
    """

    text: str
    launches: tuple[Launch, ...]
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    pointers: tuple[str, ...]
    workspace: tuple[Workspace, ...] = ()
    laid_out: dict[Tensor, Strides] = field(default_factory=dict)
    rounded: frozenset[Tensor] = frozenset()
