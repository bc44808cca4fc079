"""Programs whose every operator is its library call, for testing capture and runtime alone."""

from onchip.capture import capture, fold_batch_norm
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
        captured = capture(module, a, k, templates)
        if settings.fold_batch_norm:
            captured = fold_batch_norm(captured)
        builds.append(captured)
        return captured, plan(captured)

    program = Program(as_module(model), tuple(args), dict(kwargs or {}), build, settings)
    program.builds = builds
    return program
