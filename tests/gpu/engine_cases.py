"""Modules whose whole graph is one kernel of the tensor-core engine, and configurations of it that
take every branch of the device code between them. Their weights are small integers: on inputs that
are, too, every product and sum is exact, so that a result is float64's, rounded once.

Kernels are written for a GPU of two multiprocessors, or of one cluster, so that a program goes
through several tiles of a small problem: rings go round, teams take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from tests.modules import Fn
from torch import nn
from torch.nn import functional as F

from onchip.backends.cuda import model, packed_model
from onchip.backends.cuda.form import problem_of
from onchip.backends.cuda.geometry import Geometry
from onchip.backends.cuda.packed import geometry, narrow
from onchip.backends.cuda.problem import Config, Problem
from onchip.capture import capture
from onchip.capture.cleanup import constant_tensors
from onchip.capture.schema import is_view
from onchip.fusion.layout import choose_layouts
from onchip.fusion.machine import GPUS, Machine
from onchip.fusion.region import Region, region_of
from onchip.ir.expr import Tensor
from onchip.planning.candidates import Candidate, Context
from onchip.planning.generators.cuda import CudaGenerator, Variant

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
FEW = replace(GPUS["h200"], name="few", multiprocessors=5)  # that the model chooses for


def generator(multiprocessors: int) -> CudaGenerator:
    gpu = replace(FEW, multiprocessors=multiprocessors)
    return CudaGenerator(Machine(1, 16, gpu), torch.device("cpu"), (True, True), None)


GENERATOR = generator(FEW.multiprocessors)
# float32 operands are of bfloat16's values, so that TF32 does not round them
TOLERANCE = {BF16: 2**-8, FP16: 2**-10, FP32: 1e-5}
S = nn.Sequential


@dataclass(frozen=True)
class Case:
    """make: the module and its inputs, in their types and strides; configs: picked by hand; first:
    so many of the model's choices besides; exact: only sums, products of integers and maxima."""

    name: str
    make: Callable[[], tuple]
    configs: tuple[Config, ...] = ()
    first: int = 2
    exact: bool = True


CASES: dict[str, Case] = {}


def case(*configs: Config, first: int = 2, exact: bool = True):
    def add(make: Callable[[], tuple]) -> Callable[[], tuple]:
        CASES[make.__name__] = Case(make.__name__, make, configs, first, exact)
        return make

    return add


def image(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Channels innermost."""
    return torch.zeros(shape[0], *shape[2:], shape[1], dtype=dtype).movedim(-1, 1)


def conv(*a, d: int = 2, dtype: torch.dtype = BF16, **more) -> nn.Module:
    return (None, nn.Conv1d, nn.Conv2d, nn.Conv3d)[d](*a, **more).to(dtype)  # type: ignore[misc]


def linear(k: int, n: int, dtype: torch.dtype = BF16) -> nn.Module:
    return nn.Linear(k, n).to(dtype)


# ---- convolutions --------------------------------------------------------------------------------


@case(
    Config((8, 14, 1), 1, teams=4, x_stages=4),  # teams with slots of their own
    Config((8, 14, 1), 1, teams=3, x_stages=4),  # in turns
    Config((8, 8, 1), 1, teams=2, x_stages=2, w_stages=5),  # in turns, weights come by
    Config((8, 8, 1), 1, teams=2, x_stages=2, w_stages=18),
    Config((16, 6, 1), 0, x_stages=3, w_stages=3),  # strips
    Config((8, 4, 1), 1, row_bytes=64, x_stages=2),
    Config((8, 4, 1), 1, row_bytes=32, x_stages=3, w_stages=2),
    Config((8, 4, 2), 1, x_stages=2, w_stages=2),
    first=6,
)
def pooled():
    return S(conv(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)), image(4, 64, 28, 28)


@case(
    Config((8, 7, 2), 1, split=2, teams=2, x_stages=4, w_stages=4),
    Config((8, 7, 2), 1, blocks=2, x_stages=2, w_stages=3),
    Config((8, 7, 1), 1, blocks=2, split=2, teams=2, x_stages=2, w_stages=3),
    Config((8, 7, 2), 1, split=4, x_stages=2, w_stages=2),
    Config((8, 7, 1), 1, x_stages=2, w_stages=4, k_split=2),
    Config((8, 7, 1), 1, split=2, x_stages=2, w_stages=4, k_split=5),
    Config((8, 7, 1), 1, blocks=2, x_stages=3, w_stages=6, k_split=8),
    Config((8, 7, 2), 1, x_stages=2, w_stages=3, x_shared=2),
    Config((8, 7, 2), 1, x_stages=2, w_stages=3, x_shared=4),
    Config((8, 7, 2), 1, x_stages=2, w_stages=3, w_shared=2),
    Config((8, 7, 1), 1, split=2, teams=2, x_stages=2, w_stages=4, w_shared=2),
    Config((8, 7, 1), 1, x_stages=2, w_stages=4, w_shared=4),
    Config((8, 7, 1), 1, x_stages=1, w_stages=3, k_split=9),  # slots for all that a part fetches
    Config((8, 7, 1), 1, split=2, x_stages=2, w_stages=2, k_split=16),
    first=6,
)
def features_256():
    return S(conv(192, 256, 3, padding=1), nn.ReLU()), image(9, 192, 7, 7)


@case(Config((8, 5, 1), 1, teams=2, x_stages=4))
def strided():
    return conv(64, 64, 3, stride=2, padding=1), image(3, 64, 15, 17)


@case(Config((8, 3, 1), 0, x_stages=2, w_stages=2))
def strides_and_dilations():
    return conv(24, 40, (2, 3), stride=(3, 2), dilation=(2, 1), padding=(0, 1)), image(
        2, 24, 17, 19
    )


@case(Config((16, 4, 1), 0, split=2, x_stages=3, w_stages=3))
def dilated_96_features():
    return conv(96, 96, 3, dilation=2, padding=2, bias=False), image(2, 96, 13, 13)


@case(Config((8, 3, 1), 1, blocks=2, teams=2, x_stages=2, w_stages=4, row_bytes=32))
def channels_8():
    return S(conv(8, 200, 3), nn.ReLU()), image(2, 8, 9, 12)


@case()
def one_sided_padding():
    own = conv(32, 64, 3)
    return Fn(lambda s, x: s.c(F.pad(x, (0, 2, 1, 0))), c=own), image(2, 32, 10, 9)


@case()
def strided_1x1():
    return conv(128, 64, 1, stride=2), image(2, 128, 14, 14)


@case()
def five_by_five_odd():
    return S(conv(72, 8, 5, padding=2), nn.LeakyReLU(0.5)), image(1, 72, 11, 9)


@case()
def smaller_than_a_tile():
    return conv(16, 100, 3, padding=1), image(1, 16, 2, 3)


@case(Config((8, 6), 1, x_stages=2, w_stages=4, k_split=8, row_bytes=64), first=4)
def batch_1():
    return S(conv(256, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)), image(1, 256, 14, 14)


@case(Config((8, 4, 1), 1, x_stages=2, w_stages=3, row_bytes=32))
def groups():
    return S(conv(48, 96, 3, padding=1, groups=3), nn.ReLU()), image(2, 48, 10, 6)


@case(Config((64, 1), 0, x_stages=2, w_stages=6), Config((128, 1), 0, split=2, teams=2, w_stages=4))
def signal_64_taps():
    return S(conv(64, 128, 64, d=1), nn.ReLU(), nn.MaxPool1d(2)), image(3, 64, 191)


@case(Config((64, 1), 0, teams=2, x_stages=2, w_stages=9))
def signal_channels_last():
    own = conv(64, 64, 9, d=1, padding=4)
    return Fn(lambda s, x: F.relu(s.c(x)).mT.contiguous(), c=own), image(2, 64, 300)


@case(Config((256, 1), 0, x_stages=2, w_stages=2))
def signal_long():
    return conv(64, 64, 9, d=1, padding=4), image(2, 64, 1500)


@case(
    Config((8, 7, 1), 1, teams=2, x_stages=2, w_stages=5),
    Config((8, 4, 1), 0, x_stages=2, w_stages=4, k_split=2),
    Config((8, 7, 1), 1, x_stages=2, w_stages=3, w_shared=2),
)
def transposed_4():
    """Classes of as many taps, whose input starts elsewhere. A norm of integers is exact."""
    own, norm = nn.ConvTranspose2d(72, 64, 4, 2, 1), nn.BatchNorm2d(64, eps=0.25)
    norm.register_buffer("running_var", torch.full((64,), 0.75))  # a quarter more is one
    return S(own, norm, nn.ReLU()).to(BF16), image(3, 72, 7, 9)


@case(
    Config((8, 3, 1), 1, teams=3, x_stages=2, w_stages=3, r_stages=6),
    Config((8, 3, 1), 1, teams=2, x_stages=8, w_stages=8, r_stages=4),
    Config((8, 3, 1), 1, x_stages=2, w_stages=3, w_shared=2),
    Config((8, 6, 1), 0, blocks=2, x_stages=2, w_stages=3, x_shared=2),
    first=4,
)
def transposed_3_residual():
    """Classes of one, two and four taps."""
    own = nn.ConvTranspose2d(64, 200, 3, 2, 1, 1).to(BF16)
    return Fn(lambda s, x, y: F.relu(s.c(x) + y), c=own), image(3, 64, 9, 6), image(3, 200, 18, 12)


@case(Config((8, 6, 1), 1, teams=2, x_stages=2, w_stages=4))
def transposed_5_single():
    return nn.ConvTranspose2d(24, 72, 5, 2, 2, 1), image(2, 24, 6, 11, dtype=FP32)


@case(
    Config((8, 3, 1), 1, teams=3, x_stages=2, w_stages=3),
    Config((8, 3, 1), 1, teams=2, x_stages=8, w_stages=16),
    Config((8, 3, 1), 1, x_stages=2, w_stages=3, w_shared=2),
    first=3,
)
def transposed_uneven():
    """17 columns and 11 rows: classes of 9 and 8, and of 6 and 5. The last tile of 8
    columns has none of a class of 8."""
    return S(nn.ConvTranspose2d(64, 72, 3, 2, 1), nn.ReLU()).to(BF16), image(3, 64, 6, 9)


@case(Config((8, 3, 1), 1, teams=2, x_stages=2, w_stages=4, r_stages=4), first=3)
def transposed_uneven_residual():
    own = nn.ConvTranspose2d(64, 136, 3, 2, 1).to(BF16)
    return Fn(lambda s, x, y: F.relu(s.c(x) + y), c=own), image(3, 64, 6, 9), image(3, 136, 11, 17)


@case(Config((8, 3, 1), 1, teams=2, x_stages=2, w_stages=4), first=3)
def transposed_uneven_planes():
    """Element by element, and what the epilogue reads, too."""
    own = nn.ConvTranspose2d(24, 72, 3, 2, 1)
    f = Fn(lambda s, x, y: (F.relu(s.c(x)) + y).contiguous(), c=own)
    return f, image(2, 24, 6, 11, dtype=FP32), torch.zeros(2, 72, 11, 21)


@case(Config((8, 3, 2, 1), 1, row_bytes=64, teams=2, x_stages=2, w_stages=4))
def transposed_uneven_volume():
    return nn.ConvTranspose3d(16, 32, 3, 2, 1), image(2, 16, 3, 4, 9, dtype=FP32)


def gaps(n: int, c: int, *sizes: int, pitch: int, dtype: torch.dtype = FP32) -> torch.Tensor:
    """Channels innermost, positions `pitch` elements apart: what is between them is not read."""
    return torch.zeros(n, *sizes, pitch, dtype=dtype)[..., :c].movedim(-1, 1)


@case(Config((8, 3, 2, 1), 1, row_bytes=32, teams=2, x_stages=2, w_stages=4))
def transposed_three_channels():
    return nn.ConvTranspose3d(3, 40, 3, 2, 1), gaps(2, 3, 3, 4, 9, pitch=4)


@case(Config((8, 3, 2, 1), 1, row_bytes=32, teams=2, x_stages=2))
def volume_three_channels():
    return S(conv(3, 72, 3, d=3), nn.ReLU()).to(BF16), gaps(2, 3, 6, 5, 12, pitch=8, dtype=BF16)


@case()
def transposed_half_one_line():
    own = nn.ConvTranspose2d(40, 48, (3, 4), (1, 2), 1)
    return S(own, nn.ReLU()).to(FP16), image(2, 40, 7, 5, dtype=FP16)


@case(Config((32, 1), 0, teams=2, x_stages=3, w_stages=4))
def transposed_wave_form():
    return S(nn.ConvTranspose1d(64, 72, 16, 8, 4), nn.LeakyReLU(0.5)).to(BF16), image(2, 64, 75)


@case(Config((32, 1), 0, teams=2, x_stages=3, w_stages=4), first=3)
def transposed_wave_form_channels_last():
    own = nn.ConvTranspose1d(64, 72, 16, 8, 4).to(BF16)
    return Fn(lambda s, x: F.relu(s.c(x)).mT.contiguous(), c=own), image(2, 64, 75)


@case()
def transposed_volume():
    return nn.ConvTranspose3d(32, 64, 3, 2, 1, 1).to(BF16), image(1, 32, 3, 4, 9)


@case(Config((8, 4, 2, 1), 1, row_bytes=64, teams=2, x_stages=4, w_stages=4))
def volume():
    own = conv(32, 64, 3, d=3, padding=1)
    return S(own, nn.ReLU(), nn.MaxPool3d(2)), image(2, 32, 6, 8, 12)


@case(Config((8, 8, 1), 1, teams=2, x_stages=2, w_stages=9))
def half():
    own = conv(64, 72, 3, padding=1, dtype=FP16)
    return S(own, nn.ReLU(), nn.MaxPool2d(2)), image(2, 64, 13, 13, dtype=FP16)


@case(
    Config((8, 7, 1), 1, teams=2, x_stages=4, w_stages=4),
    Config((16, 4, 1), 0, x_stages=2, w_stages=4),
    Config((8, 7, 1), 1, x_stages=2, w_stages=4, k_split=3),
    first=4,
)
def single():
    own = conv(64, 64, 3, padding=1, dtype=FP32)
    return S(own, nn.ReLU()), image(2, 64, 14, 14, dtype=FP32)


@case(Config((8, 8), 1, x_stages=2, w_stages=3, split=2))
def single_pooled():
    own = conv(40, 100, 3, padding=1, dtype=FP32)
    return S(own, nn.MaxPool2d(2)), image(1, 40, 12, 10, dtype=FP32)


# ---- few channels: the packed form ---------------------------------------------------------------


@case(
    Config((16, 2, 1), 0, teams=2, x_stages=7),  # rows are handed on
    Config((16, 2, 1), 0, teams=3, x_stages=6),
    Config((16, 4, 1), 0, x_stages=8),
    first=4,
)
def stem():
    own = conv(3, 64, 7, stride=2, padding=3)
    return S(own, nn.ReLU(), nn.MaxPool2d(3, 2, 1)), image(2, 3, 29, 32)


@case(Config((16, 2, 1), 0, teams=2, x_stages=7))
def stem_single():
    own = conv(3, 40, 7, stride=2, padding=3, dtype=FP32)
    return S(own, nn.ReLU(), nn.MaxPool2d(3, 2, 1)), image(2, 3, 20, 30, dtype=FP32)


@case(Config((16, 2, 1), 0, split=2, teams=2, x_stages=6))
def three_channels_disjoint_windows():
    return S(conv(3, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)), image(3, 3, 12, 16)


@case(Config((8, 3, 1), 0, teams=2, x_stages=6))
def three_channels_odd():
    return S(conv(3, 33, 5, stride=2, padding=2), nn.ReLU()), image(2, 3, 19, 17)


@case(Config((16, 2, 1), 0, teams=2, x_stages=6))
def two_channels_half():
    own = conv(2, 64, 4, padding=1, dtype=FP16)
    return S(own, nn.ReLU()), image(2, 2, 11, 15, dtype=FP16)


@case(Config((64, 1), 0, teams=2, x_stages=3), first=3)  # fewer slots than warps that load
def wave_512_taps():
    own = conv(1, 128, (512, 1), stride=(4, 1), padding=(254, 0))
    return S(own, nn.ReLU(), nn.MaxPool2d((2, 1))), image(3, 1, 1024, 1)


# ---- windows through shared memory ---------------------------------------------------------------


@case(
    Config((8, 9, 1), 1, teams=2, x_stages=2),
    Config((16, 7, 1), 0, x_stages=3, w_stages=4),
    Config((8, 9, 1), 1, x_stages=2, w_stages=4, k_split=2),
)
def overlapping_pool():
    return S(conv(64, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1)), image(2, 64, 17, 15)


@case(Config((8, 5, 1), 1, teams=2, x_stages=2, w_stages=3))
def overlapping_pool_single():
    own = conv(32, 40, 3, padding=1, dtype=FP32)
    return S(own, nn.MaxPool2d(3, 2, 1)), image(2, 32, 11, 13, dtype=FP32)


@case(Config((8, 8, 1), 1, teams=2, x_stages=2))
def average_pool():
    return S(conv(64, 64, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2)), image(2, 64, 12, 16)


@case(exact=False)
def overlapping_average():
    return S(conv(64, 24, 3), nn.SiLU(), nn.AvgPool2d(3, 2, 1)), image(2, 64, 11, 12)


@case()
def windows_of_3x2():
    return S(conv(64, 64, 3, padding=1), nn.MaxPool2d((2, 3))), image(1, 64, 12, 12)


# ---- epilogues -----------------------------------------------------------------------------------


@case(
    Config((8, 9, 1), 1, teams=2, x_stages=2, w_stages=4, r_stages=4),
    Config((8, 9, 1), 1, split=2, x_stages=2, w_stages=4, r_stages=2),
    Config((16, 3, 1), 0, blocks=2, x_stages=2, w_stages=3, r_stages=3),
    Config((8, 9, 1), 1, x_stages=2, w_stages=4, r_stages=2, k_split=4),
)
def residual():
    own = conv(128, 128, 3, padding=1)
    return Fn(lambda s, x, y: F.relu(s.c(x) + y), c=own), image(2, 128, 9, 10), image(2, 128, 9, 10)


@case(Config((8, 5, 1), 1, teams=2, x_stages=2, w_stages=3, r_stages=4))
def two_residuals_single():
    own = conv(32, 72, 3, padding=1, dtype=FP32)
    return (
        Fn(lambda s, x, y, z: torch.maximum(s.c(x) + y, z), c=own),
        image(2, 32, 9, 5, dtype=FP32), image(2, 72, 9, 5, dtype=FP32),
        image(2, 72, 9, 5, dtype=FP32),
    )  # fmt: skip


@case(Config((8, 8, 1), 1, teams=2, x_stages=3))
def two_results():
    def f(s, x):
        y = F.relu(s.c(x))
        return y, F.max_pool2d(y, 2)

    return Fn(f, c=conv(64, 64, 3, padding=1)), image(2, 64, 12, 16)


@case(Config((8, 8, 1), 1, x_stages=3, w_stages=4), Config((8, 8, 1), 1, x_stages=3, teams=2))
def two_results_odd():
    def f(s, x):
        y = F.relu(s.c(x))
        return y, F.max_pool2d(y, 2)  # no window reads the last row and column

    return Fn(f, c=conv(64, 64, 3, padding=1)), image(2, 64, 13, 17)


@case(Config((8, 8, 1), 1, x_stages=3, w_stages=4))
def two_results_staged():
    def f(s, x):
        y = F.relu(s.c(x))
        return y, F.max_pool2d(y, 3, 2, 1)

    return Fn(f, c=conv(64, 72, 3, padding=1)), image(2, 64, 12, 13)


@case(Config((8, 5, 1), 1, teams=2, x_stages=2, r_stages=4))
def two_results_and_a_residual():
    def f(s, x, z):
        y = s.c(x)
        return F.relu(y), y + z

    return Fn(f, c=conv(64, 64, 3, padding=1)), image(2, 64, 10, 9), image(2, 64, 10, 9)


@case(Config((8, 9, 1), 1, teams=2, x_stages=2))
def element_by_element():
    return conv(64, 33, 3, padding=1), image(2, 64, 9, 9)


@case(Config((16, 3, 1), 0, teams=2, x_stages=2, w_stages=3))
def element_by_element_single():
    own = conv(32, 33, 3, padding=1, dtype=FP32)
    return S(own, nn.ReLU()), image(2, 32, 9, 9, dtype=FP32)


@case(Config((8, 9, 1), 1, teams=2, x_stages=2))
def channels_first():
    own = Fn(lambda s, x: F.relu(s.m(x)).contiguous(), m=conv(64, 33, 3, padding=1))
    return own, image(2, 64, 9, 10)


@case(Config((16, 3, 1), 0, teams=2, x_stages=2, w_stages=3))
def channels_first_single():
    own = conv(32, 33, 3, padding=1, dtype=FP32)
    return Fn(lambda s, x, y: F.relu(s.m(x) + y).contiguous(), m=own), *(
        image(2, n, 9, 14, dtype=FP32) for n in (32, 33)
    )


@case(
    Config((64, 1, 1), 0, x_stages=2, w_stages=3),
    Config((40, 2, 1), 0, blocks=2, x_stages=2, w_stages=3),
    exact=False,
)
def channels_first_long():
    own = Fn(lambda s, x: F.gelu(s.m(x)).contiguous(), m=conv(32, 70, 3, padding=1))
    return own, image(2, 32, 5, 75)


@case(Config((16, 6, 1), 0, teams=2, x_stages=3, w_stages=3))
def channels_first_pool():
    own = S(conv(64, 48, 3, padding=1, dtype=FP32), nn.ReLU(), nn.MaxPool2d(2))
    return Fn(lambda s, x: s.m(x).contiguous(), m=own), image(2, 64, 14, 23, dtype=FP32)


@case(Config((8, 9, 1), 1, x_stages=3, w_stages=4))
def channels_first_beside_a_pool():
    def f(s, x):
        y = F.relu(s.c(x))
        return y.contiguous(), F.max_pool2d(y, 3, 2, 1)

    return Fn(f, c=conv(64, 64, 3, padding=1)), image(2, 64, 13, 18)


@case(Config((32, 2, 1), 0, teams=2, x_stages=6))
def channels_first_few():
    own = S(conv(3, 40, 3, padding=1, dtype=FP32), nn.ReLU())
    return Fn(lambda s, x: s.m(x).contiguous(), m=own), image(2, 3, 13, 33, dtype=FP32)


@case(exact=False)
def gelu_linear():
    own = linear(256, 192)
    return Fn(lambda s, x, y: F.gelu(s.m(x)) + y, m=own), tokens(150, 256), tokens(150, 192)


# ---- totals --------------------------------------------------------------------------------------


def sums(y: torch.Tensor, *over: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What batch statistics are made of, in float32."""
    wide = y if y.dtype is torch.float64 else y.float()
    return wide.sum(over), (wide * wide).sum(over)


@case(
    Config((8, 7, 1), 1, teams=2, x_stages=2, w_stages=4),
    Config((16, 3, 1), 0, blocks=2, x_stages=2, w_stages=3),
    Config((8, 4, 2), 1, split=2, x_stages=2, w_stages=4),
    Config((8, 7, 1), 1, x_stages=2, w_stages=4, k_split=4),
    Config((8, 7, 1), 1, x_stages=2, w_stages=4, x_shared=2),
    Config((8, 7, 1), 1, x_stages=2, w_stages=4, w_shared=4),
)
def statistics():
    """What a batch norm wants: the result, and sums of it and of its squares."""

    def f(s, x):
        y = s.c(x)
        return y, *sums(y, 0, 2, 3)

    return Fn(f, c=conv(64, 130, 3, padding=1)), image(5, 64, 9, 11)


@case(Config((8, 5, 1), 1, teams=2, x_stages=2, w_stages=3), exact=False)
def statistics_finished():
    def f(s, x):
        y = F.relu(s.c(x))
        first, second = sums(y, 0, 2, 3)
        mean = first / 495
        return y, mean, torch.rsqrt(second / 495 - mean * mean + 0.25)

    return Fn(f, c=conv(32, 40, 3, padding=1, dtype=FP32)), image(5, 32, 9, 11, dtype=FP32)


@case(
    Config((8, 9, 1), 1, teams=2, x_stages=2, w_stages=4),
    Config((16, 5, 1), 0, x_stages=2, w_stages=3),
    Config((24, 8, 1), 0, x_stages=3, w_stages=3),
    Config((8, 9, 1), 1, x_stages=2, w_stages=4, k_split=3),
)
def mean_of_pictures():
    """More positions than a tile has, no multiples of one: 19 x 21. 512 is an exact divisor."""
    own = conv(64, 72, 3, padding=1)
    return Fn(lambda s, x: F.relu(s.c(x)).sum((2, 3)) / 512, c=own), image(3, 64, 19, 21)


@case(Config((8, 9, 1), 1, teams=2, x_stages=2, w_stages=4), exact=False)
def global_average_pool():
    own = conv(64, 64, 3, padding=1)
    return S(own, nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()), image(3, 64, 19, 21)


@case(Config((8, 9, 1), 1, teams=2, x_stages=2, w_stages=4), Config((8, 3, 1), 1, blocks=2))
def extremes_of_pictures():
    def f(s, x):
        y = s.c(x)
        return y.amax((2, 3)), y.amin((2, 3))

    return Fn(f, c=conv(32, 100, 3)), image(2, 32, 22, 19)


@case(
    Config((8, 5, 1), 1, teams=2, x_stages=2, w_stages=3, r_stages=4),
    Config((16, 5, 1), 0, x_stages=2, w_stages=3, r_stages=2),
)
def residual_and_its_sums():
    def f(s, x, z):
        y = F.relu(s.c(x) + z)
        return y, *sums(y, 0, 2, 3)

    return Fn(f, c=conv(64, 64, 3, padding=1)), image(4, 64, 13, 9), image(4, 64, 13, 9)


@case(Config((16, 4, 1), 0, teams=2, x_stages=8))
def three_channels_statistics():
    def f(s, x):
        y = s.c(x)
        return y, *sums(y, 0, 2, 3)

    return Fn(f, c=conv(3, 64, 5, stride=2, padding=2)), image(2, 3, 33, 41)


@case(Config((8, 5, 1), 1, x_stages=2, w_stages=3))
def sums_of_groups_half():
    own = conv(128, 80, 3, groups=2, dtype=FP16)

    def f(s, x):
        y = s.c(x)
        return y.sum((0, 2, 3)) / 64, y.amax((0, 2, 3))

    return Fn(f, c=own), image(3, 128, 11, 12, dtype=FP16)


@case(
    Config((64,), 0, split=2, teams=2, x_stages=3, w_stages=3),
    Config((96,), 0, x_stages=3, w_stages=3),
)
def column_sums():
    def f(s, x):
        y = s.m(x)
        return y, y.sum(0)

    return Fn(f, m=linear(72, 200)), tokens(1001, 72)


@case(Config((64, 1), 0, split=2, x_stages=3, w_stages=3))
def mean_of_sequences():
    return Fn(lambda s, x: F.relu(s.m(x)).sum(1), m=linear(64, 64)), tokens(6, 301, 64)


# ---- products ------------------------------------------------------------------------------------


def tokens(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def _rows(n: int):
    def make():
        return S(linear(192, 64), nn.ReLU()), tokens(n, 192)

    make.__name__ = f"linear_{n}_rows"
    return make


for _n in (1, 7, 8, 65, 300):
    case(first=1)(_rows(_n))


@case(
    Config((64,), 0, split=4, x_stages=2, w_stages=2, r_stages=2),
    Config((64,), 0, split=2, teams=2, x_stages=3, w_stages=3, r_stages=4),
    Config((32,), 0, teams=3, x_stages=4, w_stages=4, r_stages=6),
    Config((256,), 0, x_stages=2, w_stages=2, r_stages=2),
    Config((64,), 0, x_stages=4, w_stages=4, w_shared=2),
    Config((64,), 0, x_stages=4, w_stages=4, x_shared=2),
    first=4,
)
def linear_residual():
    return Fn(lambda s, x, y: s.m(x) + y, m=linear(264, 256)), tokens(700, 264), tokens(700, 256)


@case(Config((64,), 0, x_stages=3, w_stages=3, k_split=8))
def linear_k_split():
    return linear(1024, 40), tokens(50, 1024)


@case()
def linear_single():
    return linear(72, 100, FP32), tokens(130, 72, dtype=FP32)


@case(Config((64,), 0, split=2, teams=2, x_stages=4, w_stages=4))
def batched():
    return Fn(lambda s, x, y: torch.bmm(x, y.mT)), tokens(3, 100, 64), tokens(3, 136, 64)


@case()
def matrices():
    return Fn(lambda s, x, y: F.relu(x @ y.mT)), tokens(200, 128), tokens(72, 128)


# ---- inputs that are parts of others -------------------------------------------------------------


@case(Config((8, 5, 1), 1, x_stages=2, w_stages=3))
def view_of_channels_and_rows():
    return conv(24, 64, 3, padding=1), image(3, 72, 12, 11)[:2, 16:40, 1:11, 2:11]


@case(Config((8, 5, 1), 1, x_stages=2, w_stages=3))
def part_of_channels():
    own = conv(24, 64, 3, padding=1)
    return Fn(lambda s, x: F.relu(s.c(x[:, 16:40])), c=own), image(2, 72, 10, 9)


@case()
def view_of_columns():
    whole = tokens(90, 512)
    return (
        Fn(lambda s, x, y: s.m(x) + y, m=linear(128, 64)),
        whole[::2, 64:192],
        whole[:45, 256:320],
    )


@case()
def sequences_turned():
    """(positions, batch) lie the other way round."""
    return linear(64, 72), tokens(33, 5, 64).transpose(0, 1)


# ---- as problems and kernels ---------------------------------------------------------------------


def fill(t: torch.Tensor, most: int, random: torch.Generator) -> None:
    with torch.no_grad():
        t.copy_(torch.randint(-most, most + 1, t.shape, generator=random))


@dataclass(frozen=True, eq=False)
class Prepared:
    """A case, captured. example: inputs of the wanted types and strides; held: constants' values;
    inputs, results: tensors of the graph in the module's order."""

    case: Case
    module: nn.Module
    example: tuple[torch.Tensor, ...]
    problem: Problem
    region: Region
    context: Context
    held: Mapping[Tensor, torch.Tensor]
    inputs: tuple[Tensor, ...]
    results: tuple[Tensor, ...]

    @cached_property
    def configs(self) -> list[Config]:
        """Picked by hand, then the model's first ones."""
        choices = packed_model if narrow(self.problem) else model
        found = choices.configurations(self.problem, FEW)
        assert isinstance(found, list), f"{self.case.name}: {found}"
        return [*dict.fromkeys([*self.case.configs, *found[: self.case.first]])]

    def geometry(self, config: Config) -> Geometry:
        return geometry(self.problem, config)

    def candidate(self, config: Config) -> Candidate:
        """The kernel's text; AssertionError with the reason if it is refused."""
        precision = "tf32" if self.problem.kind == "tf32" else ""
        variant = Variant(self.problem, config, precision)
        made = generator(max(config.cluster, 2)).write(self.region, variant, self.context)
        assert isinstance(made, Candidate), f"{self.case.name}, {config.label}: {made}"
        return made

    def truth(self, given: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """ATen's results in float64."""
        with torch.no_grad():
            double = self.module.double()
            got = double(*(x.double() for x in given))
        return list(got) if isinstance(got, tuple) else [got]


def prepare(c: Case) -> Prepared:
    """AssertionError if the engine refuses the whole graph."""
    module, *example = c.make()
    module = module.eval()
    random = torch.Generator().manual_seed(len(c.name))
    for t in module.parameters():
        fill(t, 2, random)
    with torch.no_grad():
        captured = capture(module, tuple(example))
    graph = captured.graph
    strides = choose_layouts(graph, lambda n: is_view(n.call.target))
    constants = frozenset(constant_tensors(graph)) | frozenset(graph.constants)
    region = region_of(graph.nodes, graph, constants, {n: i for i, n in enumerate(graph.nodes)})
    found = problem_of(region, strides, constants)
    assert isinstance(found, Problem), f"{c.name}: {found}"
    held = {t: s.fetch().detach() for t, s in captured.slots.items()}
    for p in captured.prepare:
        held |= zip(p.outputs, p.compute([held[x] for x in p.sources]), strict=True)
    available = (*graph.inputs, *graph.constants, *(t for n in graph.nodes for t in n.results))
    context = Context(strides, constants, frozenset(available))
    return Prepared(
        c, module, tuple(example), found, region, context, held, tuple(graph.inputs),
        tuple(graph.output_tensors),
    )  # fmt: skip


# ---- values --------------------------------------------------------------------------------------


def integers(p: Prepared) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    given = [torch.empty_like(x) for x in p.example]
    for x in given:
        fill(x, 3, random)
    return given


def normal(p: Prepared) -> list[torch.Tensor]:
    """Values of bfloat16, whatever the type."""
    random = torch.Generator().manual_seed(2)
    return [torch.randn(x.shape, generator=random).to(BF16).to(x.dtype) for x in p.example]


def odd(p: Prepared) -> list[torch.Tensor]:
    """Integers with NaN and infinities at corners, at borders and inside of the first input."""
    given = integers(p)
    x = given[0]
    last = [n - 1 for n in x.shape]
    half = [n // 2 for n in x.shape]
    for value, at in (
        (float("nan"), [0] * x.ndim),
        (float("inf"), last),
        (float("-inf"), [last[0], *half[1:-1], 0]),
        (float("nan"), [0, *half[1:-1], last[-1]]),
    ):
        x[tuple(at)] = value
    return given
