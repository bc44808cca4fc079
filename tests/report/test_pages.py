"""Text and HTML say what the data says."""

import dataclasses
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from onchip.analysis.traffic import Traffic
from onchip.backends.nvidia.build import Built, Cubin
from onchip.backends.nvidia.resources import Resources
from onchip.backends.nvidia.source import Launch
from onchip.errors import OnchipError
from onchip.report import Decision, KernelRow
from onchip.report.build import built_figures, launched
from onchip.report.html import page
from onchip.report.picture import picture
from onchip.report.text import benefit_rows, improvement, quantity, time

from .samples import bare, full


def test_benefit_table():
    rows = {name: rest for name, *rest in benefit_rows(full())}
    assert rows["tensor accesses"] == ["8", "4", "50% less"]
    assert rows["DRAM bytes"] == ["8 kB", "4 kB", "50% less"]
    assert rows["kernel launches"] == ["4", "2", "50% less"]
    assert rows["intensity (FLOP/byte)"] == ["8", "16", "2.00×"]
    assert rows["launch overhead"] == ["20 µs", "2 µs", "90% less"]
    assert rows["latency"] == ["200 µs", "120 µs", "40% less"]


def test_text_holds_every_part():
    out = full().text(width=140)
    for part in ("pipeline:conv-relu-bn", "eager_channels_last", "physical limit", "k0",
                 "conv + relu + bn", "bn -> block.head: [unprofitable] measured",
                 "rounding_removed at a -> b", "speedup 1.67× (1.60–2.00 at 95 % confidence)",
                 "fusion was tried and lost",
                 "conv + relu + bn + block.head: 140 µs fused, 120 µs as two kernels: 1.17× "
                 "(1.10–1.20)", "one kernel or two, as measured",
                 "two kernels: 140 µs as one, 120 µs as two (cut behind bn)",
                 "1.10 times the lower bound (100 µs)"):  # fmt: skip
        assert part in out
    assert "\x1b" not in out
    assert "\x1b" in full().text(color=True)
    assert str(full()) == full().text()


def test_unknown_values_are_shown_as_unknown():
    out = bare().text()
    assert "0 %" not in out
    assert "None" not in out
    assert all(row[1:] == ("–", "–", "–") for row in benefit_rows(bare()))


def test_figures():
    assert improvement(4, 6) == "50% more"
    assert improvement(0, 3) == "–"
    assert quantity(1234567, "B") == "1.23 MB"
    assert quantity(12) == "12"
    assert time(1500.0) == "1.50 ms"


class _Page(HTMLParser):
    VOID = frozenset(("meta",))

    def __init__(self):
        super().__init__()
        self.open, self.links, self.classes, self.words = [], [], [], []

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.links += [v for k, v in attrs.items() if k in ("src", "href", "srcset")]
        self.classes.append((tag, attrs.get("class")))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def parse(text):
    page = _Page()
    page.feed(text)
    page.close()
    assert page.open == []
    return page


def test_html_is_well_formed_offline_and_complete(tmp_path):
    path = tmp_path / "r.html"
    full().to_html(path)
    text = path.read_text()
    page = parse(text)
    assert page.links == []
    assert not re.search(r"https?://|url\((?!#)|@import|<script", text)
    words = " ".join(page.words)
    for part in ("k1<&>", "block.head", "rounding_removed", "eager_channels_last", "40% less",
                 "Fusion was tried and lost", "140 µs fused, 120 µs as two kernels", "180 µs",
                 "0.61× (0.60–0.63)"):  # fmt: skip
        assert part in words
    assert "prefers-color-scheme: dark" in text
    parse_bare = tmp_path / "bare.html"
    bare().to_html(parse_bare)
    parse(parse_bare.read_text())


def test_picture_has_a_round_trip_an_operator_left_and_a_kernel_right():
    page = parse(picture(full()))
    kinds = [c for t, c in page.classes if t in ("rect", "path")]
    assert kinds.count("op") == 2 * 4
    assert kinds.count("kernel") == 2
    assert kinds.count("traffic") == 2 * 4 + 2 * 2
    assert kinds.count("inner") == 2


def test_picture_says_what_it_leaves_out():
    many = tuple(KernelRow(f"k{i}", (f"a{i}", f"b{i}"), "cpp") for i in range(50))
    r = dataclasses.replace(full(), kernels=many)
    assert "40 operators more" in picture(r)


def test_long_lists_are_cut_and_say_so():
    many = tuple(Decision((f"a{i}", f"b{i}"), False, text="far") for i in range(30))
    assert "10 more" in dataclasses.replace(full(), decisions=many).text()


def test_html_into_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(OnchipError, match="can't be written"):
        full().to_html(tmp_path / "no" / "r.html")


def gpu_kernel() -> KernelRow:
    return KernelRow(
        "k0", ("conv", "relu", "bn"), "triton", "tile 64x64", 3000, 60000, 100.0, 110.0,
        registers=168, spills=24, shared_bytes=98304, occupancy=0.25, code_bytes=20224,
        compile_s=1.25,
    )  # fmt: skip


def test_a_generated_kernel_shows_what_it_needs():
    r = replace(full(), kernels=(gpu_kernel(), *full().kernels[1:]))
    shown = ("168", "24 B", "98.3 kB", "25%", "20.2 kB", "1.2 s")
    out = r.text(120)
    head, row = (next(x for x in out.splitlines() if part in x) for part in ("spilled", "98.3 kB"))
    for part in ("registers", "shared", "occupancy", "code", "compiled"):
        assert part in head
    for part in shown:
        assert part in row
        assert f'<td class="n">{part}</td>' in page(r)


def test_what_is_unknown_of_a_cpu_kernel_takes_no_column():
    kernel = replace(full().kernels[0], code_bytes=5000, compile_s=0.0)
    out = replace(full(), kernels=(kernel,)).text(100)
    row = next(x for x in out.splitlines() if "5 kB" in x)
    assert "reused" in row
    assert "registers" not in out
    assert "generated code" not in full().text(100)


def test_figures_of_several_functions():
    """The worst of each, the code and seconds of all; local memory counts where it is used."""
    a = Resources(100, 64, 3, 1000, 4, 4, 0.25, 50, 800, 1.0)
    b = replace(a, registers=40, stack_bytes=512, spills=0, shared_bytes=5000, occupancy=0.5)
    cubins = tuple(Cubin(Path("a.cubin"), "f", 3, r) for r in (a, b))
    launches = (Launch("f", 3, (0,)), Launch("g", 0, (0,)), Launch("h", 1, (0,)))
    built = Built("triton", Path("a.py"), launches, cubins, False)
    assert built_figures(built) == {
        "registers": 100, "spills": 64, "shared_bytes": 5000, "occupancy": 0.25,
        "code_bytes": 1600, "compile_s": 2.0,
    }  # fmt: skip
    assert built_figures(replace(built, reused=True))["compile_s"] == 0.0
    assert built_figures(replace(built, cubins=())) == {}
    assert built_figures(None) == {}
    assert launched(Traffic((), (), (), (), 0, 1), built).launches == 2
