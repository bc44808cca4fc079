"""FX nodes become nodes of our graph: expressions where an operator declares them."""

from __future__ import annotations

import operator
from typing import Any

import torch

from onchip.capture.captured import Slot
from onchip.capture.export import INNER
from onchip.capture.names import node_names, origin
from onchip.capture.rewriting import called_on
from onchip.capture.template import Bindings, evaluate
from onchip.errors import CaptureError, InternalError, OpaqueOperator
from onchip.ir.dtype import BY_LABEL, DType
from onchip.ir.expr import Tensor, tensor
from onchip.ir.graph import Graph, LibraryCall, Mutation, Node, Origin, defined_by
from onchip.ops.conversion import constant
from onchip.ops.registry import OPERATORS

# Assertions about metadata hold by the guards; they compute nothing.
_DROPPED = frozenset(
    [
        "aten._assert_tensor_metadata.default",
        "aten.sym_constrain_range.default",
        "aten.sym_constrain_range_for_size.default",
    ]
)


def dtype_of(dtype: torch.dtype) -> DType:
    """Our name of a PyTorch element type. Raises CaptureError for one that we can't store."""
    found = BY_LABEL.get(str(dtype).removeprefix("torch."))
    if found is None:
        raise CaptureError(f"tensors of type {dtype} are not supported; convert them outside")
    return found


# What tracing puts between a number that forward() makes a tensor of and its use.
_COPIES = frozenset(["aten.clone.default", "aten.lift_fresh_copy.default", "aten.detach.default"])

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)


class _Builder:
    """Walks an exported program once."""

    def __init__(self, program: Any, module: torch.nn.Module, bindings: Bindings) -> None:
        self.program, self.module, self.bindings = program, module, bindings
        self.env: dict[Any, Any] = {}  # FX node -> Tensor, or a nest of Tensors
        self.inputs: list[Tensor] = []
        self.constants: dict[Tensor, str] = {}
        self.slots: dict[Tensor, Slot] = {}
        self.by_name: dict[str, Tensor] = {}
        self.nodes: list[Node] = []
        self.device = _main_device(program)

    def build(self) -> tuple[Graph, dict[Tensor, Slot]]:
        fx_nodes = list(self.program.graph.nodes)
        calls = [n for n in fx_nodes if n.op == "call_function" and _is_operator(n)]
        places = [origin(n) for n in calls]
        ops = [str(n.target).split(".")[1] for n in calls]
        pairs = [(p.module, op) for p, op in zip(places, ops, strict=True)]
        named = dict(zip(calls, zip(node_names(pairs), places, strict=True), strict=True))
        specs = {s.arg.name: s for s in self.program.graph_signature.input_specs}
        outputs: Any = ()
        for n in fx_nodes:
            match n.op:
                case "placeholder":
                    self.placeholder(n, specs[n.name])
                case "call_function" if isinstance(n.meta.get("val"), _SYMBOLS):
                    self.env[n] = evaluate(n.meta["val"], self.bindings)
                case "call_function" if "_assert_scalar" in str(n.target) and self.bindings:
                    pass  # Template.bind checked the conditions
                case "call_function" if n in named:
                    self.call(n, *named[n])
                case "call_function" if n.target is operator.getitem:
                    self.env[n] = self.env[n.args[0]][n.args[1]]
                case "output":
                    outputs = n.args[0]
                case _:
                    self.refuse(n)
        return self.finish(outputs), self.slots

    def refuse(self, n: Any) -> None:
        if str(n.target) in _DROPPED:
            return
        place = origin(n)
        raise CaptureError(
            f"{n.target} in {place} can't be captured (control flow or sizes that depend on "
            "tensor data); write it with plain tensor operators or keep it outside the model"
        )

    def placeholder(self, n: Any, spec: Any) -> None:
        kind = spec.kind.name
        if kind == "USER_INPUT":
            t = self.declare(n.meta["val"], f"input{len(self.inputs)}")
            self.inputs.append(t)
        else:
            name = (spec.target or n.name).removeprefix(INNER + ".")
            t = self.declare(n.meta["val"], name)
            self.constants[t] = name
            self.slots[t] = self.slot(kind, name, spec.target)
        self.env[n] = t
        self.by_name[spec.target or n.name] = self.by_name[n.name] = t

    def declare(self, val: torch.Tensor, name: str) -> Tensor:
        """A tensor given from outside, with the shape, dtype and strides of a fake tensor."""
        t = Tensor(name, self.sizes(val.shape), dtype_of(val.dtype))
        self.describe(t, val)
        return t

    def describe(self, t: Tensor, val: torch.Tensor) -> None:
        """Note what the rest of the compiler needs to know of a fake tensor: strides and device."""
        t.tag["strides"] = self.sizes(val.stride())
        t.tag["device"] = str(val.device)

    def sizes(self, sizes: Any) -> tuple[int, ...]:
        return tuple(int(evaluate(s, self.bindings)) for s in sizes)

    def checked(self, t: Tensor, val: torch.Tensor, name: str) -> Tensor:
        shape, dtype = self.sizes(val.shape), dtype_of(val.dtype)
        if t.tag.get("type_by_device") and dtype.compute is t.dtype.compute:
            t.dtype = dtype
        if tuple(t.shape) != shape or t.dtype is not dtype:
            raise InternalError(
                f"{name}: derived {t.dtype.label}{list(t.shape)}, PyTorch gives "
                f"{dtype.label}{list(shape)}; please report this"
            )
        t.name = name
        self.describe(t, val)
        return t

    def slot(self, kind: str, name: str, target: str) -> Slot:
        path, _, leaf = name.rpartition(".")
        try:
            owner = self.module.get_submodule(path)
        except AttributeError:
            owner = None
        if kind == "PARAMETER":
            return Slot("parameter", owner, leaf)
        if kind == "BUFFER":
            return Slot("buffer", owner, leaf)
        value = self.program.constants[target]
        if owner is not None and owner.__dict__.get(leaf) is value:
            return Slot("attribute", owner, leaf)
        return Slot("value", None, name, value)

    def call(self, n: Any, name: str, place: Origin) -> None:
        target = str(n.target)
        args, kwargs = self.resolve(n.args), self.resolve(n.kwargs)
        call = LibraryCall(target, tuple(args), dict(kwargs))
        if target in _COPIES and self.is_number(call.tensors()[0]):
            self.env[n] = call.tensors()[0]  # nothing in the graph writes to either
            return
        val = n.meta.get("val")
        expressed, reason = self.express(call, val, name)
        nest = self.results(expressed, val, name, call.tensors())
        self.env[n] = nest
        outputs = tuple(_flat(nest))
        tensors = (
            () if reason else defined_by([t for t in outputs if t is not None], call.tensors())
        )
        self.nodes.append(Node(name, call, tensors, outputs, place, reason))

    def resolve(self, x: Any) -> Any:
        """FX arguments with our tensors in place of FX nodes."""
        match x:
            case torch.fx.Node():
                if not isinstance(self.env.get(x), (Tensor, int, float)):
                    self.refuse(x)
                return self.env[x]
            case tuple() | list():
                return (
                    type(x)(self.resolve(y) for y in x)
                    if type(x) in (tuple, list)
                    else [self.resolve(y) for y in x]
                )
            case dict():
                return {k: self.resolve(v) for k, v in x.items()}
            case torch.SymInt() | torch.SymFloat() | torch.SymBool():
                return evaluate(x, self.bindings)
        return x

    def express(self, call: LibraryCall, val: Any, name: str) -> tuple[Any, str]:
        """The operator's own expressions, or (None, why it has none)."""
        function = OPERATORS.get(call.target)
        if function is None:
            return None, f"{call.target} has no expression"
        call = self.with_numbers(call)
        types = [t.dtype for t in call.tensors()]
        types += [dtype_of(v.dtype) for v in _flat(val) if isinstance(v, torch.Tensor)]
        odd = next((d for d in types if not d.is_computable), None)
        if odd is not None:
            return None, f"{odd.label} arithmetic is left to the library"
        places = {str(t.tag["device"]) for t in call.tensors()}
        places |= {str(v.device) for v in _flat(val) if isinstance(v, torch.Tensor)}
        if places - {self.device}:
            return None, f"its tensors are on {', '.join(sorted(places))}: left to the library"
        try:
            with_types = with_dtypes((call.args, call.kwargs))
            result = function(*with_types[0], **with_types[1])
        except OpaqueOperator as why:
            return None, str(why)
        except Exception as error:
            raise InternalError(
                f"{call.target} ({name}): its declaration failed with "
                f"{type(error).__name__}: {error}; please report this"
            ) from error
        return (list(result) if isinstance(result, tuple) else result), ""

    def with_numbers(self, call: LibraryCall) -> LibraryCall:
        """The call with numbers in place of those tensors without axes that forward() makes of
        numbers on the CPU while the program runs on a GPU (`torch.min(x, torch.tensor(0.5))`): a
        kernel can't read them there."""
        known: dict[Tensor, Tensor] = {}
        for t in call.tensors():
            if self.is_number(t):
                known[t] = constant((), self.slots[t].fetch().item(), t.dtype)
                known[t].name = t.name
                known[t].tag |= {"strides": (), "device": self.device}
        return called_on(call, known)

    def is_number(self, t: Tensor) -> bool:
        traced = t in self.slots and self.slots[t].kind == "value"
        elsewhere = t.tag["device"] == "cpu" != self.device
        return traced and elsewhere and not t.shape and t.dtype.is_computable

    def results(self, expressed: Any, val: Any, name: str, inputs: list[Tensor]) -> Any:
        """Tensors in the nest of `val`, checked against what PyTorch derived."""
        match val:
            case None:
                return None
            case torch.Tensor() if expressed is None:
                return self.declare(val, name)
            case torch.Tensor():
                if expressed in inputs:  # a declaration may give its argument back unchanged
                    same = expressed
                    expressed = tensor(same.shape, same.dtype, lambda *i: same[i])
                return self.checked(expressed, val, name)
            case tuple() | list():
                parts = expressed if expressed is not None else [None] * len(val)
                opaque = expressed is None
                if len(parts) != len(val):
                    raise InternalError(
                        f"{name}: {len(parts)} results are declared, PyTorch gives {len(val)}"
                    )
                return [
                    self.results(p, v, f"{name}.{i}", inputs) if opaque or p is not None else None
                    for i, (p, v) in enumerate(zip(parts, val, strict=True))
                ]
        raise CaptureError(f"{name} returns a Python number computed from tensor data")

    def finish(self, outputs: Any) -> Graph:
        results, mutations = [], []
        for spec, x in zip(self.program.graph_signature.output_specs, outputs, strict=True):
            value = self.env[x]
            match spec.kind.name:
                case "USER_OUTPUT":
                    results.append(value)
                case "BUFFER_MUTATION" | "USER_INPUT_MUTATION" | "PARAMETER_MUTATION":
                    mutations.append(Mutation(self.by_name[spec.target], value))
                case kind:
                    raise CaptureError(f"an exported output of kind {kind} is not supported")
        return Graph(
            tuple(self.inputs), self.constants, tuple(self.nodes), tuple(results), tuple(mutations)
        )


def _is_operator(n: Any) -> bool:
    return (
        isinstance(n.target, torch._ops.OpOverload)
        and str(n.target) not in _DROPPED
        and (not str(n.target).startswith("aten.sym_") and "_assert_scalar" not in str(n.target))
    )


def _main_device(program: Any) -> str:
    """Where the program runs: on the GPU of its tensors, if one has any."""
    values = (v for n in program.graph.nodes for v in _flat(n.meta.get("val")))
    found = dict.fromkeys(str(v.device) for v in values if isinstance(v, torch.Tensor))
    return next((d for d in found if d != "cpu"), "cpu")


def _flat(x: Any) -> list[Any]:
    if isinstance(x, (tuple, list)):
        return [z for y in x for z in _flat(y)]
    return [x]


def with_dtypes(x: Any) -> Any:
    """The same arguments with PyTorch's dtypes as ours."""
    match x:
        case torch.dtype():
            return dtype_of(x)
        case tuple() | list():
            return type(x)(with_dtypes(y) for y in x)
        case dict():
            return {k: with_dtypes(v) for k, v in x.items()}
    return x


def build(
    program: Any, module: torch.nn.Module, bindings: Bindings | None = None
) -> tuple[Graph, dict[Tensor, Slot]]:
    """The graph of an exported program, and where its constants live in `module`. `bindings`
    gives the sizes that the program left symbolic.

    Raises CaptureError (a use that can't be compiled), InternalError (a declaration that does
    not agree with PyTorch).
    """
    return _Builder(program, module, bindings or {}).build()
