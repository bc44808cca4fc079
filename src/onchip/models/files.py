"""Models from the user's files: `file.py:NAME` and `model.pt2`."""

import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from onchip.errors import OnchipError, UnknownModel
from onchip.models.inputs import with_batch
from onchip.models.model import Model, unknown


class Function(nn.Module):
    """A plain function as a module, so that it can be exported."""

    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor):
        """The function's own result."""
        return self.function(*inputs)


def load_python(spec: str, batch: int | None) -> Model:
    """`file.py:NAME`, after running the file.

    NAME is a Module class (built without arguments, or with the file's `get_init_inputs()`, as
    KernelBench has it), a Module, a function without parameters that returns a Module, or a
    function of tensors. The inputs come from the file's `example_inputs()` (or `get_inputs()`): a
    tensor or a tuple of them; if it takes a parameter, it gets the batch.
    """
    path, name = _split(spec)
    file = _run(path)
    offered = _offered(file)
    if not name:
        listed = ", ".join(f"{path}:{each}" for each in offered) or "none was found"
        raise UnknownModel(f"{path}: say which class or function to take ({listed})")
    if not hasattr(file, name):
        raise unknown(path, name, offered, f"it defines {', '.join(offered) or 'no model'}")
    inputs = _inputs(path, file, batch)
    module = _module(path, name, getattr(file, name), file)
    return Model(spec, module.eval(), inputs, f"the user's own, from {path}", None)


def _split(spec: str) -> tuple[str, str]:
    stem, _, name = spec.rpartition(".py")
    return f"{stem}.py", name.removeprefix(":")


def _run(path: str) -> ModuleType:
    where = Path(path)
    if not where.is_file():
        raise UnknownModel(f"{path}: no such file (looked in {Path.cwd()})")
    described = importlib.util.spec_from_file_location(f"onchip_user_{where.stem}", where)
    assert described is not None  # a .py file always has a loader
    assert described.loader is not None
    module = importlib.util.module_from_spec(described)
    sys.modules[described.name] = module  # dataclasses and pickle look modules up by name
    folder = str(where.resolve().parent)
    sys.path.insert(0, folder)  # so that it can import its neighbours, as when it is run
    try:
        described.loader.exec_module(module)
    except Exception as error:
        raise UnknownModel(f"{path}: running it failed with {_one_line(error)}") from error
    finally:
        sys.path.remove(folder)
    return module


def _call(path: str, function: Callable, *args: object) -> Any:
    """Call the user's function; if it fails, say in one line which and how."""
    try:
        return function(*args)
    except Exception as error:
        name = getattr(function, "__name__", "the function")
        raise UnknownModel(f"{path}: {name}() failed with {_one_line(error)}") from error


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def _offered(file: ModuleType) -> list[str]:
    """Names of the file's own Module classes, Modules and functions."""
    helpers = {"example_inputs", "get_inputs", "get_init_inputs"}
    return [
        name
        for name, value in vars(file).items()
        if not name.startswith("_") and name not in helpers and _is_model(value, file.__name__)
    ]


def _is_model(value: object, file: str) -> bool:
    if isinstance(value, nn.Module):
        return True
    here = getattr(value, "__module__", None) == file
    return here and (inspect.isfunction(value) or _is_module_class(value))


def _is_module_class(value: object) -> TypeGuard[type[nn.Module]]:
    return inspect.isclass(value) and issubclass(value, nn.Module)


def _module(path: str, name: str, value: object, file: ModuleType) -> nn.Module:
    if isinstance(value, nn.Module):
        return value
    if _is_module_class(value):
        given = getattr(file, "get_init_inputs", None)
        arguments = _call(path, given) if given else ()
        if needed := _required(value, len(arguments)):
            advice = f"write a function without parameters that returns {name}(...), and name it"
            raise UnknownModel(f"{path}:{name} needs {', '.join(needed)}; {advice}")
        return _call(path, value, *arguments)
    if callable(value) and not inspect.isclass(value):
        if inspect.signature(value).parameters:
            return Function(value)
        if isinstance(built := _call(path, value), nn.Module):
            return built
        text = f"{path}:{name} takes no parameters and returns {type(built).__name__}"
        raise UnknownModel(f"{text}, not a Module; name a Module or a function of tensors")
    text = f"{path}:{name} is {type(value).__name__}"
    raise UnknownModel(f"{text}; name a Module class, a Module or a function of tensors")


def _required(kind: Callable, given: int) -> list[str]:
    """Parameters without a default beyond the first `given` ones."""
    parameters = list(inspect.signature(kind).parameters.values())[given:]
    loose = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        each.name
        for each in parameters
        if each.default is inspect.Parameter.empty and each.kind not in loose
    ]


def _inputs(path: str, file: ModuleType, batch: int | None) -> tuple[Tensor, ...]:
    maker = getattr(file, "example_inputs", None) or getattr(file, "get_inputs", None)
    if maker is None:
        advice = "define example_inputs() in it, returning a tuple of tensors"
        raise UnknownModel(f"{path} has no example_inputs(); {advice}")
    takes_batch = bool(inspect.signature(maker).parameters)
    if takes_batch and (batch is not None or _required(maker, 0)):
        made = _call(path, maker, batch or 1)
    else:
        made = _call(path, maker)
    inputs = (made,) if isinstance(made, Tensor) else tuple(made)
    if not all(isinstance(each, Tensor) for each in inputs):
        kinds = ", ".join(type(each).__name__ for each in inputs)
        raise UnknownModel(f"{path}: example_inputs() gave {kinds}; it must give only tensors")
    return inputs if takes_batch else with_batch(inputs, batch)


def load_pt2(path: str, batch: int | None) -> Model:
    """`model.pt2`, written by torch.export.save, with the inputs it was exported with."""
    if not Path(path).is_file():
        raise UnknownModel(f"{path}: no such file (looked in {Path.cwd()})")
    try:
        program = torch.export.load(path)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        text = f"{path}: torch.export.load could not read it ({reason})"
        raise UnknownModel(f"{text}; write it with torch.export.save") from error
    if program.example_inputs is None:
        raise UnknownModel(
            f"{path} holds no example inputs; export it again with torch.export.save"
        )
    given: Any = program.example_inputs
    inputs, named = given
    if named or not all(isinstance(each, Tensor) for each in inputs):
        advice = "export it again with positional tensors only"
        raise UnknownModel(f"{path} was exported with keyword or nested inputs; {advice}")
    if batch is not None and inputs and batch != inputs[0].shape[0]:
        _check_dynamic(path, program, int(inputs[0].shape[0]))
    return Model(
        path,
        program.module(),
        with_batch(tuple(inputs), batch),
        f"exported program from {path}, with its own example inputs",
        None,
    )


def _check_dynamic(path: str, program: torch.export.ExportedProgram, size: int) -> None:
    names: Any = program.graph_signature.user_inputs
    node: Any = next(node for node in program.graph.nodes if node.name == names[0])
    value = node.meta["val"]
    if isinstance(value.shape[0], int):
        advice = "export it again with that batch or a dynamic one"
        raise OnchipError(f"{path} was exported for batch {size} only; {advice}")
