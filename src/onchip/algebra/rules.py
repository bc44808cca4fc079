"""The rules, in the order in which they are applied; each has a name, which is also the kind of
its entries in the numerics ledger and what `Settings(without=...)` takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from onchip.algebra.extremes import max_before_curves, max_before_steps
from onchip.algebra.folding import AFFINE_FOLDED, NORM_FOLDED, fold_affine
from onchip.algebra.means import mean_before_affine
from onchip.algebra.norms import cancel_bias
from onchip.algebra.positions import mean_into_layer
from onchip.algebra.rewriting import without_unread
from onchip.algebra.single import single_element
from onchip.capture.captured import Captured
from onchip.capture.cleanup import COMPUTED_ONCE
from onchip.errors import OnchipError
from onchip.settings import Settings


@dataclass(frozen=True, slots=True)
class Rule:
    """`apply(captured, names of the rules in force)` rewrites every match; None: capture does it.
    `rounds`: the result may be rounded otherwise than eager's (in real arithmetic none changes
    it)."""

    name: str
    sentence: str
    rounds: bool
    apply: Callable[[Captured, frozenset[str]], Captured] | None


# Constants go past means before they are folded: a mean may leave of a layer little to fold into.
RULES = (
    Rule(COMPUTED_ONCE, "the same operator on the same arguments is computed once", False, None),
    Rule("single_element", "a fold over axes of one element is a view", False, single_element),
    Rule("mean_before_affine", "constants scale and shift what a mean, sum or average pool gives",
         True, mean_before_affine),
    Rule("mean_into_layer", "a mean, sum or average pool of a layer is a smaller layer", True,
         mean_into_layer),
    Rule("bias_cancelled", "a constant in front of a norm that subtracts it again is left out",
         True, cancel_bias),
    Rule(NORM_FOLDED, "a layer's weights take over the inference batch norm behind it", True,
         fold_affine),
    Rule(AFFINE_FOLDED, "a layer's weights take over the constants that scale and shift it", True,
         fold_affine),
    Rule("max_before_steps", "relu, clamps, positive factors and the like follow a max pool", False,
         max_before_steps),
    Rule("max_before_curves", "sigmoid, tanh, exp and the like follow a max pool", True,
         max_before_curves),
)  # fmt: skip
NAMES = frozenset(r.name for r in RULES)


def in_force(settings: Settings) -> frozenset[str]:
    """The names of the rules that these settings leave. Raises OnchipError for a name in
    `without` that is no rule's."""
    if unknown := sorted(settings.without - NAMES):
        raise OnchipError(
            f"Settings(without=...): no rule is named {', '.join(unknown)}; the rules are "
            f"{', '.join(sorted(NAMES))}"
        )
    out = set(settings.without)
    if settings.numerics == "eager":
        out.update(r.name for r in RULES if r.rounds)
    if not settings.fold_batch_norm:
        out.add(NORM_FOLDED)
    return NAMES - out


def simplify(captured: Captured, settings: Settings = Settings()) -> Captured:
    """Apply the rules until none finds anything: each application takes FLOPs, bytes or operators
    away, so that comes to an end. Each rewriting stands in the ledger."""
    names = in_force(settings)
    while True:
        before = captured
        for r in RULES:
            if r.apply is not None and r.name in names:
                captured = r.apply(captured, names)
        if captured is before:
            return without_unread(captured)
