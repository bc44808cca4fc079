"""Rules that shorten the work: exact in real arithmetic, for any (finite) parameters."""

from onchip.algebra.folding import fold_batch_norm
from onchip.algebra.rules import RULES, Rule, in_force, simplify

__all__ = ["RULES", "Rule", "fold_batch_norm", "in_force", "simplify"]
