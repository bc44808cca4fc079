"""Programs whose every operator is its library call, for testing capture and runtime alone."""

from onchip.algebra import simplify
from onchip.capture import capture
from onchip.capture.capture import as_module
from onchip.planning.plan import LibraryStep, Plan
from onchip.runtime.program import Program
from onchip.settings import Settings


def library_plan(captured):
    return Plan(tuple(LibraryStep(n) for n in captured.graph.nodes))


def compile_library(model, args=(), kwargs=None, settings=Settings(), plan=library_plan):
    """A Program; `builds` on it counts how often it specialised."""
    builds = []

    def build(module, a, k, templates):
        captured = simplify(capture(module, a, k, templates), settings)
        builds.append(captured)
        return captured, plan(captured)

    program = Program(as_module(model), tuple(args), dict(kwargs or {}), build, settings)
    program.builds = builds
    return program
