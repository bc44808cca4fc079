"""The rules of the house, read from the sources."""

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "onchip"
FILES = sorted(SOURCE.rglob("*.py"))
FOLDERS = [
    "ir", "ops", "models", "capture", "analysis", "algebra", "fusion", "backends", "planning",
    "runtime", "report",
]  # fmt: skip
ANYWHERE = {"errors", "settings"}  # importable from every folder
TOP = {"api", "cli", "__main__", "__init__", *ANYWHERE}
TORCH_ALLOWED = (
    "models/", "capture/", "algebra/", "backends/library/", "planning/", "runtime/", "api.py",
    "cli.py", "report/bench", "backends/triton/worker.py", "backends/nvidia/launcher.py",
    "backends/nvidia/first_run.py", "backends/cudnn/launcher.py", "backends/triton/functions.py",
)  # fmt: skip
# they run the whole compiler, so they stand above it like the api
DRIVERS = {
    f"report/{name}.py"
    for name in ("bench", "bench_gpu", "bench_engine", "bench_kernelbench", "bench_verify")
}
MOST_LINES = 400


def place(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


def folder(path: Path) -> str:
    """The folder of a file, or its own name at the top."""
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else path.stem


def imports(path: Path) -> list[tuple[int, str]]:
    """(line, module) of everything that a file imports, also inside functions; relative imports
    as absolute ones."""
    out = []
    package = ["onchip", *path.relative_to(SOURCE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            out += [(node.lineno, a.name) for a in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                head = package[: len(package) - node.level + 1]
                base = ".".join([*head, *([base] if base else [])])
            # `from onchip import api` imports onchip.api
            out += [(node.lineno, f"{base}.{a.name}") for a in node.names]
    return out


def check_order(path: Path) -> list[str]:
    """Imports that go against the data flow."""
    here, wrong = folder(path), []
    if here in TOP - ANYWHERE or place(path) in DRIVERS:
        return wrong
    for line, module in imports(path):
        parts = module.split(".")
        if parts[0] != "onchip" or len(parts) < 2:
            continue
        target = parts[1]
        if target in ANYWHERE:
            continue
        if here in ANYWHERE or target not in FOLDERS or FOLDERS.index(target) > FOLDERS.index(here):
            wrong.append(f"{place(path)}:{line}: {here} imports {module}")
    return wrong


def check_torch(path: Path) -> list[str]:
    if place(path).startswith(TORCH_ALLOWED):
        return []
    heavy = ("torch", "triton")
    found = [(n, m) for n, m in imports(path) if m.split(".")[0] in heavy]
    return [f"{place(path)}:{n}: imports {m}" for n, m in found]


def test_the_sources_are_found():
    assert len(FILES) > 40
    assert {folder(f) for f in FILES} <= set(FOLDERS) | TOP


@pytest.mark.parametrize("path", FILES, ids=place)
def test_a_file_imports_only_from_its_own_and_earlier_folders(path):
    assert check_order(path) == []


def test_nothing_but_the_top_imports_a_driver():
    names = {f"onchip.{d.removesuffix('.py').replace('/', '.')}" for d in DRIVERS}
    for path in FILES:
        if folder(path) not in TOP and place(path) not in DRIVERS:
            found = [
                m for _, m in imports(path) if any(m.startswith(n + ".") or m == n for n in names)
            ]
            assert found == [], f"{place(path)} imports {found}"


@pytest.mark.parametrize("path", FILES, ids=place)
def test_torch_is_confined(path):
    assert check_torch(path) == []


@pytest.mark.parametrize("path", FILES, ids=place)
def test_a_file_is_short_and_finished(path):
    text = path.read_text()
    lines = text.count("\n") + 1
    assert lines <= MOST_LINES, f"{place(path)} has {lines} lines; split it"
    assert not re.search(r"\b(TODO|FIXME|XXX|HACK)\b", text)


@pytest.mark.parametrize("name", ["", *FOLDERS])
def test_a_folder_states_its_purpose(name):
    init = SOURCE / name / "__init__.py"
    first = (ast.get_docstring(ast.parse(init.read_text())) or "").split("\n")[0]
    assert len(first) > 15, f"{place(init)} needs a one-line docstring"


@pytest.mark.parametrize(
    ("file", "text", "check"),
    [
        ("ir/bad.py", "from onchip.ops import registry", check_order),
        ("analysis/bad.py", "def f():\n    from onchip import api", check_order),
        ("analysis/bad.py", "from ..report import text", check_order),
        ("errors.py", "import onchip.ir.expr", check_order),
        ("backends/cpp/bad.py", "import torch.nn as nn", check_torch),
        ("fusion/bad.py", "def f():\n    from triton import language", check_torch),
    ],
)
def test_the_checks_find_a_violation(file, text, check, tmp_path, monkeypatch):
    monkeypatch.setattr("test_architecture.SOURCE" if __name__ == "test_architecture" else
                        f"{__name__}.SOURCE", tmp_path)  # fmt: skip
    bad = tmp_path / file
    bad.parent.mkdir(parents=True, exist_ok=True)
    bad.write_text(text)
    assert len(check(bad)) == 1
