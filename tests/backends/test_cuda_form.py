"""Regions as problems of the tensor-core engine: what a problem says, evaluated in numpy from
memory, must be the module's result; its generated epilogue too, run by the host's compiler."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.backends.cuda_host import Text, library, nvrtc_log
from tests.backends.cuda_problems import Case, Epilogue, case_of, check, in_reach, over, tile_places
from tests.modules import Fn
from torch import nn
from torch.nn import functional as F

from onchip.backends.cuda.problem import ACC, Problem
from onchip.fusion.refusal import Refusal, Rule
from onchip.ir.dtype import DType
from onchip.ir.expr import Load

S = nn.Sequential
HALVES = (DType.BF16, DType.F16)
MAKERS: dict[str, Callable[[], tuple]] = {}
REFUSED: dict[str, tuple[str, Callable[[], tuple]]] = {}


def fits(maker: Callable[[], tuple]) -> Callable[[], tuple]:
    MAKERS[maker.__name__] = maker
    return maker


def refused(fact: str):
    def add(maker: Callable[[], tuple]) -> Callable[[], tuple]:
        REFUSED[maker.__name__] = (fact, maker)
        return maker

    return add


def image(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Channels innermost."""
    x = torch.randn(shape[0], *shape[2:], shape[1]).to(dtype)
    return x.movedim(-1, 1)


def conv(*args, dtype: torch.dtype = torch.float32, **more) -> nn.Module:
    return nn.Conv2d(*args, **more).to(dtype)


def norm(n: int) -> nn.Module:
    m = nn.BatchNorm2d(n)
    for t, low, high in (
        (m.running_mean, -1, 1), (m.running_var, 0.5, 2), (m.weight.data, -2, 2),
        (m.bias.data, -1, 1),
    ):  # fmt: skip
        assert t is not None
        t.uniform_(low, high)
    return m


# ---- forms that fit ------------------------------------------------------------------------------


@fits
def conv_relu_norm_pool():
    return S(conv(16, 24, 3, padding=1), nn.ReLU(), norm(24), nn.MaxPool2d(2)), image(2, 16, 8, 10)


@fits
def overlapping_pool():
    return S(conv(16, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, 1)), image(2, 16, 9, 10)


@fits
def pool_without_prologue():
    own = conv(16, 24, 3, padding=1, bias=False)
    return S(own, nn.MaxPool2d(2, 2, 1, ceil_mode=True)), image(2, 16, 7, 7)


@fits
def average_pool():
    return S(conv(16, 24, 3), nn.SiLU(), nn.AvgPool2d(3, 2, 1)), image(2, 16, 9, 10)


@fits
def average_of_what_there_is():
    pool = nn.AvgPool2d(3, 2, 1, count_include_pad=False, ceil_mode=True)
    return S(conv(16, 24, 3, padding=1), pool), image(2, 16, 9, 10)


@fits
def global_average():
    return S(conv(16, 24, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1)), image(2, 16, 9, 10)


@fits
def gated_pool():
    def f(s, x):
        y = F.max_pool2d(s.c(x), 2)
        return y * torch.sigmoid(y)

    return Fn(f, c=conv(16, 24, 3, padding=1)), image(2, 16, 8, 10)


@fits
def two_results():
    def f(s, x):
        y = F.relu(s.c(x))
        return y, F.max_pool2d(y, 2) + 1

    return Fn(f, c=conv(16, 24, 3, padding=1)), image(2, 16, 8, 10)


@fits
def residual():
    return Fn(lambda s, x: F.relu(s.c(x) + x), c=conv(16, 16, 3, padding=1)), image(2, 16, 9, 10)


@fits
def residual_behind_a_pool():
    own = conv(16, 16, 3, padding=1)
    return (
        Fn(lambda s, x, y: F.max_pool2d(s.c(x), 2) + y, c=own),
        image(2, 16, 8, 8),
        image(2, 16, 4, 4),
    )


@fits
def residual_in_front_of_a_pool():
    own = conv(16, 16, 3, padding=1)
    return Fn(lambda s, x: F.max_pool2d(s.c(x) + x, 3, 2, 1), c=own), image(2, 16, 8, 8)


@fits
def gate_of_each_channel():
    own = conv(16, 24, 3, padding=1)
    gate = torch.randn(2, 24, 1, 1)
    return Fn(lambda s, x, g: s.c(x) * torch.sigmoid(g), c=own), image(2, 16, 8, 10), gate


@fits
def masked_positions():
    mask = torch.rand(1, 1, 8, 10) < 0.5
    own = conv(16, 24, 3, padding=1)
    return Fn(lambda s, x, m: torch.where(m, s.c(x), -1.0), c=own), image(2, 16, 8, 10), mask


@fits
def a_residual_of_each_kind():
    def f(s, x, y, z):
        v = s.c(x) + y
        return v, F.max_pool2d(v, 2) + z

    own = conv(16, 16, 3, padding=1)
    return Fn(f, c=own), image(2, 16, 8, 8), image(2, 16, 8, 8), image(2, 16, 4, 4)


@fits
def linear_gelu():
    return S(nn.Linear(32, 40), nn.GELU()), torch.randn(5, 7, 32)


@fits
def linear_of_one_row():
    return nn.Linear(32, 40), torch.randn(1, 32)


@fits
def linear_of_a_flattened_picture():
    return S(nn.Flatten(), nn.Linear(16 * 4 * 6, 24)), image(3, 16, 4, 6)


@fits
def added_product():
    f = Fn(lambda s, c, a: torch.addmm(c, a, s.w, beta=0.5, alpha=2), w=torch.randn(16, 24))
    return f, torch.randn(8, 24), torch.randn(8, 16)


@fits
def batched_product():
    f = Fn(lambda s, a, b: torch.bmm(a, b.transpose(1, 2)) * 0.25)
    return f, torch.randn(3, 8, 16), torch.randn(3, 12, 16)


@fits
def batched_product_of_slices():
    return Fn(lambda s, x: x[:, :, 4:20] @ x[:, :, 20:36].transpose(1, 2)), torch.randn(2, 8, 48)


@fits
def bf16_product_by_rows():
    f = Fn(lambda s, a, b, c: torch.matmul(a, b) * c + a[:, :1])
    a, b, c = torch.randn(8, 40), torch.randn(40, 24), torch.randn(24)
    return f, *(x.bfloat16() for x in (a, b, c))


@fits
def bf16_batched_product_by_rows():
    f = Fn(lambda s, a, b: torch.relu(torch.bmm(a, b)))
    return f, torch.randn(3, 8, 16).bfloat16(), torch.randn(3, 16, 24).bfloat16()


@fits
def fp16_heads_by_rows():
    a, b = torch.randn(2, 3, 5, 16), torch.randn(2, 3, 16, 8)
    return Fn(lambda s, a, b: a @ b), a.half(), b.half()


@fits
def bf16_slices_by_rows():
    f = Fn(lambda s, x: x[:, :8, 8:24] @ x[:, :, 24:40])
    return f, torch.randn(2, 16, 48).bfloat16()


@fits
def bf16_channels_of_two_axes_by_rows():
    f = Fn(lambda s, a, b: a.flatten(1) @ b.permute(2, 0, 1, 3).flatten(0, 2))
    b = torch.randn(2, 3, 16, 24).bfloat16()
    return f, image(8, 16, 2, 3, dtype=torch.bfloat16), b


@fits
def split_heads():
    own = nn.Linear(16, 24)
    return Fn(lambda s, x: s.l(x).view(2, 6, 3, 8).transpose(1, 2), l=own), torch.randn(2, 6, 16)


@fits
def joined_heads():
    own = nn.Linear(24, 16)
    f = Fn(lambda s, x: s.l(x.transpose(1, 2).reshape(2, 6, 24)) + 1, l=own)
    return f, torch.randn(2, 3, 6, 8)


@fits
def grouped():
    own = conv(32, 24, 3, padding=1, groups=4)
    return S(own, nn.ReLU(), nn.MaxPool2d(2)), image(2, 32, 6, 6)


@fits
def strided():
    return conv(16, 24, 3, stride=2, padding=1), image(2, 16, 9, 10)


@fits
def dilated():
    return conv(16, 24, 3, dilation=2, padding=2), image(2, 16, 9, 10)


@fits
def unlike_in_each_dimension():
    own = conv(16, 24, (1, 5), stride=(2, 1), padding=(0, 3), dilation=(1, 2))
    return own, image(2, 16, 9, 12)


@fits
def padded_on_one_side():
    own = conv(16, 24, 3, stride=2)
    return Fn(lambda s, x: s.c(F.pad(x, (0, 1, 0, 1))), c=own), image(2, 16, 9, 10)


@fits
def padded_twice():
    own = conv(16, 24, 3, padding=1)
    return Fn(lambda s, x: s.c(F.pad(x, (0, 1, 2, 1))), c=own), image(2, 16, 9, 10)


@fits
def cropped_and_padded():
    own = conv(16, 24, 3, padding=1)
    return Fn(lambda s, x: s.c(F.pad(x, (-1, -2, -1, 0))), c=own), image(2, 16, 9, 10)


@fits
def pointwise():
    return S(conv(16, 24, 1), nn.ReLU()), image(2, 16, 9, 10)


@fits
def pointwise_strided():
    return S(conv(16, 24, 1, stride=2), nn.ReLU()), image(2, 16, 9, 10)


@fits
def windows_side_by_side():
    return conv(16, 24, 2, stride=2), image(2, 16, 8, 10)


@fits
def patches_of_planes():
    own = conv(3, 24, 8, stride=8)
    return Fn(lambda s, x: s.c(x).flatten(2).transpose(1, 2), c=own), torch.randn(2, 3, 32, 32)


@fits
def patches_of_pixels():
    return conv(3, 24, 8, stride=8), image(2, 3, 32, 32)


@fits
def one_dimension():
    return nn.Conv1d(16, 24, 5, padding=2), image(2, 16, 20)


@fits
def three_dimensions():
    own = nn.Conv3d(16, 24, 3, padding=1)
    return S(own, nn.ReLU(), nn.MaxPool3d(2)), image(2, 16, 4, 6, 8)


@fits
def pixel_shuffle():
    return S(conv(16, 32, 3, padding=1), nn.PixelShuffle(2)), image(2, 16, 4, 5)


@fits
def transposed_side_by_side():
    return nn.ConvTranspose2d(16, 24, 2, 2), image(2, 16, 5, 6)


@fits
def transposed_without_stride():
    return nn.ConvTranspose2d(16, 24, 3, 1, 1), image(2, 16, 5, 6)


@fits
def transposed_with_padding():
    return nn.ConvTranspose2d(16, 24, 4, 2, 1), image(2, 16, 5, 6)


@fits
def transposed_with_unlike_classes():
    return nn.ConvTranspose2d(16, 24, 3, 2, 1, 1), image(2, 16, 5, 6)


@fits
def transposed_with_kernel_of_5():
    return S(nn.ConvTranspose2d(16, 24, 5, 2, 2, 1), nn.Tanh()), image(2, 16, 5, 6)


@fits
def transposed_with_classes_along_one_line():
    own = nn.ConvTranspose2d(16, 24, (3, 4), (1, 2), (1, 1))
    return S(own, norm(24), nn.ReLU()), image(2, 16, 5, 7)


@fits
def transposed_with_two_strides():
    return nn.ConvTranspose2d(16, 24, (8, 3), (4, 2), (2, 1), (0, 1)), image(2, 16, 5, 3)


@fits
def transposed_with_positions_of_no_taps():
    """They are the bias, chosen where the sums are stored."""
    return nn.ConvTranspose2d(16, 24, (1, 3), 2, (0, 1), (1, 1)), image(2, 16, 5, 6)


@fits
def transposed_wave_form():
    return S(nn.ConvTranspose1d(16, 24, 16, 8, 4), nn.LeakyReLU(0.1)), image(2, 16, 20)


@fits
def transposed_volume():
    return nn.ConvTranspose3d(16, 24, 3, 2, 1, 1), image(2, 16, 2, 3, 4)


@fits
def transposed_uneven():
    """9 and 11 positions of a stride of 2."""
    return nn.ConvTranspose2d(16, 24, 3, 2, 1), image(2, 16, 5, 6)


@fits
def transposed_uneven_volume():
    return nn.ConvTranspose3d(16, 24, 3, 2, 1), image(2, 16, 2, 3, 4)


@fits
def transposed_uneven_wave_form():
    """80 positions of a stride of 7: four classes of 12, three of 11."""
    own = nn.ConvTranspose1d(16, 24, 14, 7, 3)
    return Fn(lambda s, x, y: F.silu(s.c(x)) * y, c=own), image(2, 16, 11), image(2, 24, 78)


@fits
def transposed_uneven_residual():
    """Both residuals are read element by element or by tiles, where a class has no position too."""
    f = Fn(lambda s, x, y, z: F.relu(s.c(x) + y) * z, c=nn.ConvTranspose2d(16, 24, 3, 2, 1))
    return f, image(2, 16, 5, 6), image(2, 24, 9, 11), torch.randn(2, 24, 9, 11)


def gaps(n: int, c: int, *sizes: int, pitch: int = 4) -> torch.Tensor:
    """Channels innermost, positions `pitch` elements apart."""
    return torch.randn(n, *sizes, pitch)[..., :c].movedim(-1, 1)


@fits
def volume_of_three_channels():
    return S(nn.Conv3d(3, 16, 3), nn.Tanh()), gaps(2, 3, 4, 5, 6)


@fits
def transposed_of_three_channels():
    return nn.ConvTranspose3d(3, 16, 3, 2, 1), gaps(2, 3, 2, 3, 4)


@fits
def transposed_residual():
    f = Fn(lambda s, x, y: F.relu(s.c(x) + y), c=nn.ConvTranspose2d(16, 24, 4, 2, 1))
    return f, image(2, 16, 5, 6), image(2, 24, 10, 12)


@fits
def bf16_gelu():
    own = conv(16, 24, 3, padding=1, dtype=torch.bfloat16)
    return S(own, nn.GELU()), image(2, 16, 6, 6, dtype=torch.bfloat16)


@fits
def fp16_silu_residual():
    own = conv(16, 16, 3, padding=1, dtype=torch.float16)
    f = Fn(lambda s, x: F.silu(s.c(x)) + x, c=own)
    return f, image(2, 16, 6, 6, dtype=torch.float16)


@fits
def bf16_to_float32():
    own = nn.Linear(32, 24).bfloat16()
    return Fn(lambda s, x: torch.tanh(s.l(x)).float(), l=own), torch.randn(8, 32).bfloat16()


# ---- forms that do not ---------------------------------------------------------------------------


@refused("no axis of the sum lies side by side in input0")
def planes():
    return conv(16, 24, 3, padding=1), torch.randn(2, 16, 8, 8)


@refused("no sum of products with axes of its own on both sides")
def depthwise():
    return conv(16, 16, 3, padding=1, groups=16), image(2, 16, 8, 8)


@fits
def three_channels():
    return conv(3, 16, 7, stride=2, padding=3), image(2, 3, 16, 16)


@fits
def one_channel():
    return conv(1, 16, 5, padding=2), image(2, 1, 9, 11)


@refused("a step of input0 is 12 bytes, no multiple of 16")
def rows_of_three_with_weights_that_vary():
    return Fn(lambda s, x, w: x @ w.t()), torch.randn(32, 3), torch.randn(16, 3)


@refused("groups of a transposed convolution with a stride")
def transposed_with_groups():
    return nn.ConvTranspose2d(16, 24, 4, 2, 1, groups=2), image(2, 16, 5, 6)


@refused("differ in more than their taps")
def transposed_with_several_classes_of_each_number_of_taps():
    return nn.ConvTranspose1d(16, 24, 7, 3, 2), image(2, 16, 7)


@refused("differ in more than their taps")
def transposed_with_dilation():
    return nn.ConvTranspose1d(16, 24, 4, 2, 1, dilation=3), image(2, 16, 9)


@refused("a fold over features behind the product")
def transposed_side_by_side_with_a_pool_behind():
    return S(nn.ConvTranspose2d(16, 24, 2, 2), nn.AvgPool2d(2)), image(2, 16, 5, 6)


@refused("a fold over batches behind the product")
def transposed_with_a_pool_behind():
    return S(nn.ConvTranspose2d(16, 24, 4, 2, 1), nn.AvgPool2d(2)), image(2, 16, 5, 6)


@refused("both element by element and folded")
def layer_norm():
    return S(nn.Linear(16, 24), nn.LayerNorm(24)), torch.randn(4, 16)


@refused("more than one product")
def two_layers():
    return S(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16)), torch.randn(4, 16)


@refused("not affine")
def upsampled():
    return S(nn.Upsample(scale_factor=2), conv(16, 24, 3, padding=1)), image(2, 16, 4, 5)


@refused("an operand is computed (maximum), not read from memory")
def activation_in_front():
    return S(nn.ReLU(), conv(16, 24, 3, padding=1)), image(2, 16, 4, 5)


@refused("a product of float64 and float64 values")
def float64():
    return nn.Linear(16, 24).double(), torch.randn(4, 16).double()


@refused("axes of one kind that do not lie as one in memory")
def heads_of_one_tensor():
    f = Fn(lambda s, a, b: a @ b.transpose(-1, -2))
    a, b = torch.randn(2, 8, 3, 16), torch.randn(2, 12, 3, 16)
    return f, a.transpose(1, 2), b.transpose(1, 2)


@refused("its channels lie 12 elements apart")
def two_activations_by_rows():
    return Fn(lambda s, a, b: a @ b), torch.randn(8, 16), torch.randn(16, 12)


@refused("a channel of input1 is 24 bytes, no multiple of 16")
def bf16_rows_of_twelve():
    f = Fn(lambda s, a, b: a @ b)
    return f, torch.randn(8, 16).bfloat16(), torch.randn(16, 12).bfloat16()


@refused("the first element of input1 is 8 bytes, no multiple of 16")
def bf16_rows_from_the_fifth():
    f = Fn(lambda s, a, b: a @ b[:, 4:28])
    return f, torch.randn(8, 16).bfloat16(), torch.randn(16, 32).bfloat16()


@refused("its channels lie 96 elements apart")
def bf16_every_second_feature():
    f = Fn(lambda s, a, b: a @ b[:, ::2])
    return f, torch.randn(8, 16).bfloat16(), torch.randn(16, 96).bfloat16()


@refused("two folds of the product differ")
def two_pools():
    def f(s, x):
        y = s.c(x)
        return F.max_pool2d(y, 2) + F.avg_pool2d(y, 2)

    return Fn(f, c=conv(16, 24, 3)), image(2, 16, 10, 10)


@refused("max over windows padded with 0.0")
def pool_over_zeros():
    f = Fn(lambda s, x: F.max_pool2d(F.pad(s.c(x), (1, 1, 1, 1)), 2), c=conv(16, 24, 3))
    return f, image(2, 16, 10, 10)


@refused("weights its elements")
def depthwise_behind():
    return S(conv(16, 24, 1), conv(24, 24, 3, padding=1, groups=24)), image(2, 16, 8, 8)


@refused("what a window folds depends on the window")
def weighted_windows():
    return S(conv(16, 24, 1), conv(24, 24, 3, groups=24)), image(2, 16, 8, 8)


@refused("a window's elements are not neighbours")
def dilated_pool():
    return S(conv(16, 24, 3), nn.MaxPool2d(2, dilation=2)), image(2, 16, 10, 10)


@fits
def weights_as_values():
    return Fn(lambda s, x: x @ s.w + s.w, w=torch.randn(16, 16)), torch.randn(16, 16)


@refused("results are not stored")
def a_mask():
    return Fn(lambda s, x: s.c(x) > 0, c=conv(16, 24, 3)), image(2, 16, 10, 10)


# ---- totals over positions -----------------------------------------------------------------------


def sums(y: torch.Tensor, *over: int) -> tuple[torch.Tensor, torch.Tensor]:
    return y.sum(over), (y * y).sum(over)


@fits
def statistics_of_a_batch():
    def f(s, x):
        y = s.c(x)
        return y, *sums(y, 0, 2, 3)

    return Fn(f, c=conv(16, 24, 3, padding=1)), image(3, 16, 6, 8)


@fits
def finished_statistics():
    def f(s, x):
        y = F.relu(s.c(x))
        first, second = sums(y, 0, 2, 3)
        mean = first / 144
        return mean, torch.rsqrt(second / 144 - mean * mean + s.e), y

    return Fn(f, c=conv(16, 24, 1), e=nn.Parameter(torch.rand(24))), image(3, 16, 6, 8)


@fits
def mean_of_a_large_picture():
    return S(conv(16, 24, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()), image(
        3, 16, 20, 19
    )


@fits
def extremes_of_rows():
    def f(s, x):
        y = s.c(x)
        return y.amax((0, 3)), y.amin((0, 3)), y.sum((0, 3)).mul(2)

    return Fn(f, c=conv(16, 24, 3)), image(3, 16, 20, 19)


@fits
def sums_of_a_residual():
    def f(s, x, r):
        y = s.c(x) + r
        return y, *sums(y, 0, 2, 3)

    return Fn(f, c=conv(16, 24, 1)), image(3, 16, 6, 8), image(3, 24, 6, 8)


@fits
def sums_of_columns():
    def f(s, x):
        y = s.m(x)
        return y, *sums(y, 0)

    return Fn(f, m=nn.Linear(16, 24)), torch.randn(300, 16)


@fits
def sums_of_groups():
    f = Fn(lambda s, x: sums(s.c(x), 0, 2, 3), c=conv(32, 48, 3, groups=2))
    return f, image(3, 32, 6, 8)


@fits
def sums_of_matrices():
    f = Fn(lambda s, x, y: torch.bmm(x, y.mT).sum(1))
    return f, torch.randn(3, 300, 16), torch.randn(3, 24, 16)


@refused("it reads the product both element by element and folded")
def batch_norm_of_the_batch():
    f = Fn(lambda s, x: F.batch_norm(s.c(x), None, None, training=True), c=conv(16, 24, 3))
    return f, image(3, 16, 20, 19)


@refused("it reads the product both element by element and folded")
def norm_of_the_batch_by_hand():
    def f(s, x):
        y = s.c(x)
        mean, square = y.mean((0, 2, 3), keepdim=True), (y * y).mean((0, 2, 3), keepdim=True)
        return (y - mean) * torch.rsqrt(square - mean * mean + 1e-5)

    return Fn(f, c=conv(16, 24, 3)), image(3, 16, 20, 19)


@refused("it folds the product twice")
def variance():
    f = Fn(lambda s, x: torch.var_mean(s.c(x), (0, 2, 3)), c=conv(16, 24, 3))
    return f, image(3, 16, 20, 19)


@refused("a fold over features behind the product")
def sums_of_rows():
    return Fn(lambda s, x: s.m(x).sum(1), m=nn.Linear(16, 24)), torch.randn(300, 16)


@refused("positions side by side in memory are kept, and others folded")
def mean_of_distant_positions():
    return Fn(lambda s, x: s.m(x).mean(0), m=nn.Linear(16, 24)), torch.randn(300, 5, 16)


@refused("over other axes than another's")
def sums_over_different_axes():
    def f(s, x):
        y = s.c(x)
        return y.sum((2, 3)), y.sum((0, 2, 3))

    return Fn(f, c=conv(16, 24, 3)), image(3, 16, 20, 19)


# ---- tests ---------------------------------------------------------------------------------------


def made(maker: Callable[[], tuple]) -> Case:
    torch.manual_seed(sum(map(ord, maker.__name__)))
    module, *inputs = maker()
    return case_of(module, *inputs)


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {name: made(maker) for name, maker in MAKERS.items()}


@pytest.fixture(scope="module")
def texts(cases) -> dict[str, Text]:
    return {
        n: Text(c.problem, c.strides, n) for n, c in cases.items() if isinstance(c.problem, Problem)
    }


@pytest.fixture(scope="module")
def by_address(cases, texts) -> dict[str, Text]:
    """Texts for a caller that copies no tiles, of those that read some."""
    some = {n: cases[n] for n, t in texts.items() if t.epilogue.tile_reads}
    return {n: Text(c.problem, c.strides, f"{n}_far", tiles=False) for n, c in some.items()}


@pytest.mark.parametrize("name", MAKERS)
def test_the_problem_is_the_modules(name: str, cases) -> None:
    p = check(cases[name])
    tile_places(p, cases[name])


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_names_what_is_violated(name: str) -> None:
    fact, maker = REFUSED[name]
    found = made(maker).problem
    assert isinstance(found, Refusal)
    assert found.rule is Rule.CONTRACTION_FORM
    assert fact in found.text
    assert found.subject


class HostEpilogue(Epilogue):
    """Values by the generated text. The sums are float32, as accumulators are."""

    def __init__(self, p: Problem, case: Case, text: Text, lib) -> None:
        super().__init__(p, case)
        object.__setattr__(self, "call", lambda *args: text.run(lib, *args))
        object.__setattr__(self, "tiles", text.epilogue.tile_reads)

    def before(self, d: np.ndarray) -> np.ndarray:
        return self.call("before", self.case.values, d, []).astype(np.float64)

    def result(self, n: int, d: np.ndarray) -> np.ndarray:
        axes = self.axes(self.p.results[n].pooled)
        reads = [in_reach(self.p, Load(r.tensor, r.index, r.pad)) for r in self.tiles]
        here = self.p.results[n].pooled or not self.p.fold
        tiles = [over(ld, axes, self.case.values) if here else np.zeros(d.shape) for ld in reads]
        return self.call(f"result{n}", self.case.values, d, tiles)

    def total(self, n: int, d: np.ndarray) -> np.ndarray:
        reads = [Load(r.tensor, r.index, r.pad) for r in self.tiles]
        tiles = [over(ld, self.axes(False), self.case.values) for ld in reads]
        return self.call(f"total{n}", self.case.values, d, tiles).astype(np.float64)


@pytest.fixture(scope="module")
def lib(texts, by_address, tmp_path_factory):
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    every = [*texts.values(), *by_address.values()]
    return library("".join(t.host_loops() for t in every), tmp_path_factory.mktemp("form"))


@pytest.mark.parametrize("name", MAKERS)
def test_the_text_computes_what_the_module_does(name: str, cases, texts, by_address, lib) -> None:
    case = cases[name]
    halves = all(r.tensor.dtype in HALVES for r in case.problem.results)
    epilogue = HostEpilogue(case.problem, case, texts[name], lib)
    check(case, 2e-4 if halves else 5e-6, epilogue)
    if name in by_address:
        text = by_address[name]
        assert text.epilogue.tile_reads == ()
        assert "tile[" not in text.epilogue.text
        check(case, 2e-4 if halves else 5e-6, HostEpilogue(case.problem, case, text, lib))


@pytest.mark.parametrize("name", MAKERS)
def test_the_text_stores_where_the_result_lies(name: str, cases, texts, lib) -> None:
    p, case = cases[name].problem, cases[name]
    for n, r in enumerate(p.results):
        axes = Epilogue(p, case).axes(r.pooled)
        places = [over(i, axes, case.values) for i in r.index]
        want = sum(i * s for i, s in zip(places, case.strides[r.tensor], strict=True))
        got = texts[name].elements(lib, n, tuple(a.extent for a in axes))
        np.testing.assert_array_equal(got, want)


@pytest.mark.skipif(importlib.util.find_spec("cuda.bindings") is None, reason="needs NVRTC")
def test_nvrtc_compiles_every_text(texts) -> None:
    assert nvrtc_log("".join(t.kernel() for t in texts.values())) == ""


def test_lines_that_lie_as_one_are_one(cases) -> None:
    assert [n.positions for n in cases["pointwise"].problem.lines] == [180]
    assert [n.positions for n in cases["linear_gelu"].problem.lines] == [35]
    side = cases["windows_side_by_side"].problem
    assert (side.channels, side.taps) == (32, 2)
    assert [(n.positions, n.taps) for n in side.lines] == [(5, 1), (8, 1), (1, 2)]
    flat = cases["linear_of_a_flattened_picture"].problem
    assert (flat.channels, flat.taps) == (16 * 4 * 6, 1)


def test_lines_that_totals_have_apart(cases) -> None:
    def lines(name: str) -> list[tuple[int, bool]]:
        return [(n.positions, n.apart) for n in cases[name].problem.lines]

    assert lines("statistics_of_a_batch") == [(8, False), (6, False), (3, False)]
    assert lines("finished_statistics") == [(144, False)]
    assert lines("mean_of_a_large_picture") == [(17, False), (18, False), (3, True)]
    assert lines("extremes_of_rows") == [(17, False), (18, True), (3, False)]
    assert [t.fold for t in cases["extremes_of_rows"].problem.totals] == ["max", "min", "sum"]
    # what a tile has whole is a window
    assert cases["global_average"].problem.totals == ()
    assert cases["sums_of_a_residual"].problem.reads[1].kind == "tile"


def test_lines_that_a_result_has_apart_stay_apart() -> None:
    """Planes behind a pointwise convolution: pixels follow each other, pictures do not."""
    f = Fn(lambda s, x: s.c(x).contiguous(), c=conv(16, 24, 1))
    p = check(case_of(f, image(2, 16, 6, 8)))
    assert [n.positions for n in p.lines] == [48, 2]
    assert not p.results[0].tile


def test_reads_are_of_the_kind_that_their_place_allows(cases) -> None:
    def kinds(name: str) -> list[str]:
        return [r.kind for r in cases[name].problem.reads]

    assert kinds("residual") == ["feature", "tile"]
    assert kinds("residual_behind_a_pool") == ["feature", "tile"]
    assert kinds("residual_in_front_of_a_pool") == ["feature", "direct"]
    assert kinds("a_residual_of_each_kind") == ["feature", "direct", "tile"]
    assert kinds("gate_of_each_channel") == ["feature", "direct"]


def test_float32_products_have_the_precision_asked_for() -> None:
    x = torch.randn(4, 16)
    assert case_of(nn.Linear(16, 24), x, precision="tf32x3").problem.kind == "tf32x3"
    assert case_of(nn.Linear(16, 24), x, precision="ieee").problem.kind == "tf32x3"
    assert case_of(nn.Linear(16, 24), x).problem.kind == "tf32"


def test_weights_that_vary_are_read_as_they_lie(cases) -> None:
    def steps(name: str) -> tuple[bool, int, int, int]:
        p = cases[name].problem
        return p.w_features_inner, p.channels, p.w_step, p.w_batch

    assert steps("batched_product") == (False, 16, 16, 16 * 12)
    assert steps("bf16_product_by_rows") == (True, 40, 24, 0)
    assert steps("bf16_batched_product_by_rows") == (True, 16, 24, 16 * 24)
    assert steps("fp16_heads_by_rows") == (True, 16, 8, 16 * 8)
    assert steps("bf16_slices_by_rows") == (True, 16, 48, 16 * 48)
    assert steps("bf16_channels_of_two_axes_by_rows") == (True, 96, 24, 0)


def test_a_value_that_several_read_is_written_once(texts) -> None:
    text = texts["linear_gelu"].epilogue.text
    assert text.count("acc + c.") == 1
    assert "erff(" in text
    assert "onchip::coarse_erf(" in texts["bf16_gelu"].epilogue.text
    assert "tanhf(" in texts["bf16_to_float32"].epilogue.text


def test_what_channels_share_is_computed_once_for_them() -> None:
    def f(s, x, v):
        return s.c(x) * torch.rsqrt(v + 1e-5)[:, None, None]

    case = case_of(Fn(f, c=conv(16, 24, 1)), image(2, 16, 4, 4), torch.rand(24))
    assert isinstance(case.problem, Problem)
    text = Text(case.problem, case.strides, "shared").epilogue.text
    once, _, each = text.partition("float before")
    assert "rsqrtf(" in once
    assert "rsqrtf(" not in each


def test_a_problem_without_a_fold_has_the_sum_itself_in_front(cases) -> None:
    assert cases["residual"].problem.before is ACC
    assert cases["residual"].problem.fold == ""
