"""An exported program without in-place operators.

PyTorch's own run_decompositions traces the whole program again, which takes longer than exporting
it. Most models write in place only to a fresh intermediate (`relu_` behind a convolution), where
renaming later uses is enough; anything else is left to run_decompositions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.export import exported_program
from torch.fx import Graph, Node
from torch.utils._python_dispatch import TorchDispatchMode

from onchip.capture import schema

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
_BATCH_NORM = torch.ops.aten.batch_norm.default
_BATCH_NORM_EVAL = torch.ops.aten._native_batch_norm_legit_no_training.default

# Composite operators that never hand their argument (or a view of it) back.
_FRESH = frozenset(
    f"aten::{name}"
    for name in [
        *("linear", "matmul", "softmax", "log_softmax", "prelu", "selu", "relu6"),
        *(f"{kind}{d}d" for kind in ("conv", "conv_transpose", "max_pool") for d in (1, 2, 3)),
        *("avg_pool1d", *(f"adaptive_avg_pool{d}d" for d in (1, 2, 3))),
        *("batch_norm", "layer_norm", "group_norm"),
    ]
)


class _NotSimple(Exception):
    """The program needs run_decompositions; the text says why."""


def functional(program: Any) -> Any:
    """The program without in-place operators, composite operators kept whole. `program` may be
    changed or used up: go on with the result."""
    try:
        why = _refusal(program)
        if not why:
            _rewrite(program.graph)
            return program
    except _NotSimple:  # what was rewritten by then is as good as before
        program.graph.eliminate_dead_code()
        program.graph_module.recompile()
    return run_decompositions(program)


# ---- simple programs -----------------------------------------------------------------------------


def _refusal(program: Any) -> str:
    """Why the program is not simple; "" if it is. Changes nothing."""
    if any(torch.is_autocast_enabled(d) for d in ("cpu", "cuda")):
        return "autocast converts arguments inside operators"
    if any(s.kind.name != "USER_OUTPUT" for s in program.graph_signature.output_specs):
        return "it writes to its inputs or buffers"
    graph = program.graph
    position = {n: i for i, n in enumerate(graph.nodes)}
    names: dict[Node, list[Node]] = {}
    for n in graph.nodes:
        if n.op == "call_function" and n.target is not operator.getitem:
            if not isinstance(n.target, torch._ops.OpOverload):
                return f"{n.target} is not an operator"
            why = _writes(n, position, names)
        elif n.op not in ("call_function", "placeholder", "output"):
            return f"{n.op} of {n.target}"
        else:
            why = ""
        if why or any(isinstance(x, torch.SymInt) for v in _tensors(n) for x in v.shape):
            return why or f"{n.name} has a symbolic size"
    return ""


def _tensors(n: Node) -> list[torch.Tensor]:
    val = n.meta.get("val")
    found = list(val) if isinstance(val, (tuple, list)) else [val]
    return [x for x in found if isinstance(x, torch.Tensor)]


def _writes(n: Node, position: dict[Node, int], names: dict[Node, list[Node]]) -> str:
    """Why the values that this operator writes can't simply get a new name. `names`: the nodes
    that stand for the same memory, for each node that does."""
    if _trains(n):
        return f"{n.name} updates running statistics"
    if not n.target._schema.is_mutable:
        return ""
    if _functional_overload(n.target) is None or torch.Tag.inplace_view in n.target.tags:
        return f"{n.target} has no functional twin"
    if torch.Tag.nondeterministic_seeded in n.target.tags:
        return f"{n.target} draws random numbers"
    written = n.args[0] if n.args else None
    if not isinstance(written, Node) or not (written in names or _fresh(written)):
        return f"{n.name} writes to an input, a constant or a view"
    same = names.setdefault(written, [written])
    for user in (u for name in same for u in name.users):
        if position[user] < position[n] and user not in same and not _fresh(user):
            return f"{n.name} writes to what {user.name} may be a view of"
    if not _same_result(n):
        return f"{n.name} rounds its result to another type"
    same.append(n)
    names[n] = same
    return ""


_STATISTICS = ("batch_norm", "instance_norm")


def _trains(n: Node) -> bool:
    """Normalisations update their running statistics, which their schemas do not say."""
    if n.target is _BATCH_NORM_EVAL or not any(x in str(n.target) for x in _STATISTICS):
        return False
    arguments = n.target._schema.arguments
    given = dict(zip((a.name for a in arguments), n.args, strict=False)) | n.kwargs
    if n.target._schema.name == "aten::instance_norm" and given["running_mean"] is None:
        return False
    return bool(n.kwargs) or given.get("training", given.get("use_input_stats", True)) is not False


def _fresh(n: Node) -> bool:
    """Whether the node's result has memory of its own."""
    if n.op != "call_function" or not isinstance(n.target, torch._ops.OpOverload):
        return n.op == "output"
    if n.target.namespace != "aten" or schema.aliases(str(n.target)):
        return False
    return not _composite(n.target) or n.target._schema.name in _FRESH


def _composite(op: Any) -> bool:
    return op.has_kernel_for_dispatch_key(_COMPOSITE)


def _functional_overload(op: Any) -> Any:
    """`add.Tensor` for `add_.Tensor`: same arguments, a result instead of a write."""
    name, overload = op._schema.name.partition("::")[2], op._overloadname
    packet = getattr(torch.ops.aten, name[:-1], None) if name.endswith("_") else None
    twin = getattr(packet, overload, None) if packet is not None else None
    if op.namespace != "aten" or twin is None or twin._schema.is_mutable:
        return None
    here, there = op._schema.arguments, twin._schema.arguments
    same = len(op._schema.returns) == 1 and [(a.name, str(a.type)) for a in here] == [
        (a.name, str(a.type)) for a in there
    ]
    return twin if same and len(twin._schema.returns) == 1 else None


def _same_result(n: Node) -> bool:
    """Whether the functional twin gives the type, shape and strides that the write leaves."""
    values = _values(n)
    written, mode = n.args[0].meta["val"], n.args[0].meta["val"].fake_mode  # type: ignore[union-attr]
    with mode, torch.no_grad():
        got = _functional_overload(n.target)(*values[0], **values[1])
    return (got.dtype, got.shape, got.stride()) == (
        written.dtype,
        written.shape,
        written.stride(),
    )


def _values(n: Node) -> tuple[Any, Any]:
    return torch.fx.map_arg((n.args, n.kwargs), lambda a: a.meta["val"])  # type: ignore[return-value]


# ---- rewriting -----------------------------------------------------------------------------------


def _rewrite(graph: Graph) -> None:
    for n in list(graph.nodes):
        if n.op != "call_function" or n.target is operator.getitem:
            continue
        if n.target is _BATCH_NORM:
            _replace(n, _batch_norm(graph, n))
        elif n.target._schema.is_mutable:
            _rename(n)
        elif _composite(n.target) and not _kept_whole(n.target):
            _replace(n, _decomposed(graph, n))


def _kept_whole(op: Any) -> bool:
    """As run_decompositions decides it: composites stay whole if they can't alias or mutate."""
    return not (
        torch.Tag.maybe_aliasing_or_mutating in op.tags
        or op._schema.is_mutable
        or any(a.alias_info is not None for a in op._schema.arguments)
        or op is torch.ops.aten.native_batch_norm.default
    )


def _rename(n: Node) -> None:
    """`n` computes a new tensor; what reads the written one later reads that."""
    written = n.args[0]
    n.target = _functional_overload(n.target)
    later, x = set(), n.next
    while x.op != "root":
        later.add(x)
        x = x.next
    written.replace_all_uses_with(n, delete_user_cb=later.__contains__)  # type: ignore[union-attr]


def _replace(old: Node, new: Any) -> None:
    if isinstance(new, (list, tuple)):
        for item in list(old.users):
            if item.target is not operator.getitem:
                raise _NotSimple(f"{old.name} gives a list to {item.name}")
            item.replace_all_uses_with(new[item.args[1]])  # type: ignore[index]
            item.graph.erase_node(item)
    else:
        old.replace_all_uses_with(new)
    old.graph.erase_node(old)


def _added(graph: Graph, like: Node, target: Any, args: Any, kwargs: Any, val: Any) -> Node:
    new = graph.call_function(target, args, kwargs)
    for key in ("nn_module_stack", "stack_trace"):
        if key in like.meta:
            new.meta[key] = like.meta[key]
    new.meta["val"] = val
    return new


def _batch_norm(graph: Graph, n: Node) -> Node:
    """Inference batch norm as run_decompositions writes it."""
    x, weight, bias, mean, var, _, momentum, eps, _ = n.args
    val = n.meta["val"]
    with val.fake_mode, torch.no_grad():
        empty = val.new_empty((0,))
    args = (x, weight, bias, mean, var, momentum, eps)
    with graph.inserting_before(n):
        norm = _added(graph, n, _BATCH_NORM_EVAL, args, {}, (val, empty, empty))
        return _added(graph, n, operator.getitem, (norm, 0), {}, val)


class _Recorder(TorchDispatchMode):
    """Writes every operator that runs inside it as a node in front of `like`."""

    def __init__(self, graph: Graph, like: Node, known: dict[int, Node]) -> None:
        super().__init__()
        self.graph, self.like, self.known = graph, like, known
        self.keep: list[Any] = []  # an id must not be used again while `known` holds it

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        results = list(out) if isinstance(out, (tuple, list)) else [out]
        if not any(isinstance(x, torch.Tensor) for x in results):
            return out  # a question about metadata
        if not isinstance(func, torch._ops.OpOverload) or func._schema.is_mutable:
            raise _NotSimple(f"{self.like.target} calls {func}")
        with self.graph.inserting_before(self.like):
            new = _added(self.graph, self.like, func, self.nodes(args), self.nodes(kwargs), out)
            self.keep.append((args, out))
            if isinstance(out, torch.Tensor):
                self.known[id(out)] = new
            else:
                for i, x in enumerate(results):
                    item = _added(self.graph, self.like, operator.getitem, (new, i), {}, x)
                    self.known[id(x)] = item
        return out

    def nodes(self, x: Any) -> Any:
        match x:
            case torch.Tensor():
                if id(x) not in self.known:
                    raise _NotSimple(f"{self.like.target} makes a tensor of its own")
                return self.known[id(x)]
            case tuple() | list():
                return type(x)(self.nodes(y) for y in x)
            case dict():
                return {k: self.nodes(v) for k, v in x.items()}
        return x


def _decomposed(graph: Graph, n: Node) -> Any:
    """The operators that a composite one consists of; the node, or nodes, of its result."""
    args, kwargs = _values(n)
    known = {id(a.meta["val"]): a for a in n.all_input_nodes}
    modes = [a.meta["val"].fake_mode for a in n.all_input_nodes]
    if not modes:
        raise _NotSimple(f"{n.target} reads no tensor")
    recorder = _Recorder(graph, n, known)
    with modes[0], recorder, torch.no_grad():
        out = n.target.decompose(*args, **kwargs)
    return recorder.nodes(list(out) if isinstance(out, (tuple, list)) else out)


# ---- everything else -----------------------------------------------------------------------------


# PyTorch's own list of them; private to it, so found by name
_LISTING = "_collect_all_valid_cia_ops"


def run_decompositions(program: Any) -> Any:
    """PyTorch's way.

    run_decompositions({}) prepares an override for each of PyTorch's ~700 composite operators,
    0.3 s a call whatever the model; only those that the program contains can matter.
    """
    present = {n.target for n in program.graph.nodes if n.op == "call_function"}
    collect = getattr(exported_program, _LISTING, None)
    if collect is None:
        return program.run_decompositions({})
    setattr(exported_program, _LISTING, lambda: _composite_operators(collect) & present)
    try:
        return program.run_decompositions({})
    finally:
        setattr(exported_program, _LISTING, collect)


_composites: set[Any] = set()


def _composite_operators(collect: Callable[[], Any]) -> set[Any]:
    if not _composites:
        _composites.update(collect())
    return _composites
