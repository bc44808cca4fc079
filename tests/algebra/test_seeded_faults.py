"""One wrong edit in each rule: some test of the rules must turn red."""

import pytest
from tests.algebra import test_folding as folding
from tests.algebra import test_rules as rules
from tests.backends.test_seeded_faults import Fault, plant
from torch import nn

from onchip.errors import OnchipError

HERE = "onchip.algebra"
ACROSS = rules.ACROSS


def stays(test, index):
    """One case of a test whose cases are functions."""
    (mark,) = (m for m in test.pytestmark if m.name == "parametrize")
    return lambda: test(mark.args[1][index])


def positions(layer):
    return lambda: rules.test_means_over_positions(layer)


FAULTS = {
    "a tap meets positions beyond the results": (
        "positions:_dimensions", "0 <= i * s + j * spread - p < results", "True",
        positions(ACROSS(4, 32, 3, stride=2, padding=1, output_padding=1))),
    "a tap meets positions of another": (
        "positions:_dimensions", "y * s + j * spread - p", "y * s - j * spread + p",
        positions(rules.CONV(4, 32, 3, stride=2, padding=(1, 0)))),
    "a transposed convolution meets its input forwards": (
        "positions:_met_sums", "rows[::-1] if backwards else rows", "rows",
        rules.test_means_over_depth_and_one_dimension),
    "the input's mean is not scaled to the results'": (
        "positions:_over_taps", "one.size / one.out", "1.0", positions(ACROSS(4, 32, 3))),
    "a sum has one bias": (
        "positions:_summed_bias", "* r.count", "", positions(rules.CONV(4, 32, 1))),
    "the weights of a linear layer lie by input channel": (
        "positions:_as_linear", 'found.kind == "transposed"', "False",
        positions(ACROSS(4, 32, 3, padding=1))),
    "a position that nobody reads is summed": (
        "positions:_of_positions", "not all(one.read for one in dims if one.folded)", "False",
        stays(rules.test_means_that_stay, 6)),
    "a window's taps are not apart by the stride": (
        "positions:_behind_conv", "rows[i * s + j * spread][j]", "rows[i + j * spread][j]",
        lambda: rules.test_average_pools_of_convolutions(
            rules.CONV(4, 6, (2, 3), stride=(2, 1), groups=2), 2, 2)),
    "taps of a transposed convolution rise": (
        "positions:_behind_transposed", "(high - a) * s", "(low + a) * s",
        lambda: rules.test_average_pools_of_convolutions(
            ACROSS(4, 6, 4, stride=2, padding=1, bias=False), 2, None)),
    "features of other groups": (
        "features:_features_made", "[1] * len(rest[3:4])", "rest[3:4]",
        lambda: rules.test_means_over_features_and_rows(True)),
    "rows have one bias": (
        "features:of_rows", "* times", "", lambda: rules.test_means_over_features_and_rows(True)),
    "a mean reads what others read": (
        "rewriting:Facts.source", "self.users.get(t) == [reader]", "True",
        stays(rules.test_means_that_stay, 10)),
    "more work than before": (
        "rewriting:pays", "flops[1] >= share * flops[0]", "False",
        stays(rules.test_means_that_stay, 5)),
    "a sum has one constant": (
        "means:_past", "r.count if sums", "1 if sums",
        lambda: rules.test_constants_past_a_mean("sum", True)),
    "padding is shifted": (
        "means:_match_affine", "not r.whole", "False",
        lambda: rules.test_constants_past_an_average_pool({"padding": 1}, False)),
    "a scale that varies in a mean": (
        "means:_match_affine", "e.varies & set(r.dims)", "False",
        lambda: rules.test_constants_past_a_mean("mean", True)),
    "a factor of a sum is forgotten": (
        "folding:_scale_and_shift", "shift + c * e.factor", "shift + c",
        lambda: rules.test_constants_are_folded_into_a_layer(nn.Linear(4, 6), (3, 4))),
    "the shift is not scaled": (
        "folding:_scale_and_shift", "scale * c, shift * c", "scale * c, shift",
        rules.test_a_chain_is_rounded_once_and_an_addition_leaves_the_weights_alone),
    "weights are rounded twice": (
        "rewriting:derived", 'if "exact" in s.tag', "if False",
        rules.test_what_two_rules_derive_is_rounded_once),
    "a column has one value a feature": (
        "folding:_by_feature", "e.varies <= {found.axis}", "True",
        stays(rules.test_constants_that_stay, 0)),
    "a norm of other channels": (
        "folding:_by_feature", "found.axis == 1", "True", stays(folding.test_not_folded, 3)),
    "a falling slope": (
        "extremes:_commutes", "bool(allowed[f.op](argument))", "True",
        stays(rules.test_maxima_that_stay, 7)),
    "a slope of zero": (
        "extremes:_commutes", "bool(allowed[f.op](argument))", "True",
        stays(rules.test_maxima_that_stay, 9)),
    "a softplus that falls": (
        "extremes:_commutes", "bool(allowed[f.op](argument))", "True",
        stays(rules.test_maxima_that_stay, 8)),
    "a negative factor": (
        "extremes:_commutes", "e.c > 0", "True", stays(rules.test_maxima_that_stay, 3)),
    "a constant that differs in a window": (
        "extremes:_commutes", "e.varies & dims", "False",
        stays(rules.test_maxima_that_stay, 5)),
    "a window of padding": (
        "extremes:_windows_filled", "0 <= y * s - p + t * d < size", "True",
        stays(rules.test_maxima_that_stay, 12)),
    "positions are read": (
        "extremes:_reduced", "len(n.results) != 1", "False",
        stays(rules.test_maxima_that_stay, 10)),
    "a bias differs in a group": (
        "norms:_averaged", "spatial if args[1] == x.shape[1] else spatial | {1}", "spatial",
        stays(rules.test_biases_that_stay, 0)),
    "a constant differs along a row": (
        "norms:_match", "added.varies & averaged", "False", stays(rules.test_biases_that_stay, 3)),
    "what the user holds is given out": (
        "single:_must_be_new", "result in facts.kept", "False",
        stays(rules.test_folds_that_stay, 0)),
    "a fold of two elements": (
        "single:_match", "x.shape[d] != 1", "x.shape[d] > 4",
        stays(rules.test_folds_that_stay, 3)),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name, monkeypatch):
    place, old, new, test = FAULTS[name]
    plant(Fault(f"{HERE}.{place}", old, new, None, ""), monkeypatch)
    with pytest.raises((AssertionError, RuntimeError, LookupError, ValueError, OnchipError)):
        test()
