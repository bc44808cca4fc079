"""Functions of the expression language that Triton has not: a generated file holds a copy of those
that it calls (spelling.prelude), so that it stands alone.

Arguments of one function have one type. Only the text of this file is used; every function must be
complete without names of this module, other functions below excepted.
"""

# pyright: basic, reportOperatorIssue=false
import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def maximum(a, b):  # NaN in either wins
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def minimum(a, b):
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def multiply(a, b):
    return a * b


@triton.jit
def either(a, b):
    return a | b


@triton.jit
def both(a, b):
    return a & b


@triton.jit
def first_largest(a, i, b, j):  # of two values and their positions: NaN first, then the largest
    wins = (a > b) | ((a != a) & (b == b))
    ties = (a == b) | ((a != a) & (b != b))
    left = wins | (ties & (i < j))
    return tl.where(left, a, b), tl.where(left, i, j)


@triton.jit
def first_smallest(a, i, b, j):
    wins = (a < b) | ((a != a) & (b == b))
    ties = (a == b) | ((a != a) & (b != b))
    left = wins | (ties & (i < j))
    return tl.where(left, a, b), tl.where(left, i, j)


@triton.jit
def divide(a, b):  # float32 and float64, rounded as IEEE says
    return a / b if a.dtype == tl.float64 else tl.div_rn(a, b)


@triton.jit
def reciprocal(x):
    return 1.0 / x if x.dtype == tl.float64 else tl.div_rn(1.0, x)


@triton.jit
def floor_divide(a, b):  # integers
    q = a // b
    r = a % b
    return q - ((r != 0) & ((r < 0) != (b < 0))).to(a.dtype)


@triton.jit
def remainder(a, b):  # integers; the sign is the divisor's
    m = a % b
    return tl.where((m != 0) & ((m < 0) != (b < 0)), m + b, m)


@triton.jit
def remainder_of_floats(a, b):
    m = libdevice.fmod(a, b)
    return tl.where((m != 0.0) & ((m < 0.0) != (b < 0.0)), m + b, m)


@triton.jit
def floor_divide_floats(a, b):  # Python's //, which agrees with the remainder
    m = libdevice.fmod(a, b)
    d = divide(a - m, b)
    d = tl.where((m != 0.0) & ((m < 0.0) != (b < 0.0)), d - 1.0, d)
    q = tl.floor(d)
    q = tl.where(d - q > 0.5, q + 1.0, q)
    exact = divide(a, b)
    q = tl.where(d == 0.0, libdevice.copysign(d, exact), q)
    return tl.where(b == 0.0, exact, q)


@triton.jit
def power(a, b):  # integers wrap
    result = a * 0 + 1
    for _ in range(a.dtype.primitive_bitwidth):
        result = tl.where((b & 1) != 0, result * a, result)
        a = a * a
        b = b >> 1
    return result


@triton.jit
def signed_power(a, b):  # a negative exponent gives 0, but for the bases 1 and -1
    odd = tl.where((b & 1) != 0, a, a * a)
    return tl.where(b < 0, tl.where((a == 1) | (a == -1), odd, 0), power(a, b))


@triton.jit
def shift_left(a, b):  # amounts outside of the width give 0
    inside = (b >= 0) & (b < a.dtype.primitive_bitwidth)
    return tl.where(inside, a << tl.where(inside, b, 0), 0)


@triton.jit
def shift_right(a, b):  # amounts outside of the width give the sign
    inside = (b >= 0) & (b < a.dtype.primitive_bitwidth)
    return tl.where(inside, a >> tl.where(inside, b, 0), tl.where(a < 0, a * 0 - 1, 0))


@triton.jit
def shift_right_unsigned(a, b):
    inside = b < a.dtype.primitive_bitwidth
    return tl.where(inside, a >> tl.where(inside, b, 0), 0)


@triton.jit
def logaddexp(a, b):
    r = maximum(a, b) + libdevice.log1p(libdevice.exp(-tl.abs(a - b)))
    return tl.where((a == b) & (tl.abs(a) == float("inf")), a, r)


@triton.jit
def xlogy(a, b):
    return tl.where((a == 0.0) & (b == b), 0.0, a * libdevice.log(b))


@triton.jit
def digamma(x):  # as ATen: reflected below 0, recurrence up to 10, an asymptotic series beyond
    whole = libdevice.trunc(x)
    turn = (x - whole) * 3.141592653589793
    below = x < 0.0
    y = tl.where(below, 1.0 - x, x)
    total = tl.where(below, reciprocal(libdevice.tan(turn)) * -3.141592653589793, 0.0)
    for _ in range(10):
        small = y < 10.0
        total = tl.where(small, total - reciprocal(y), total)
        y = tl.where(small, y + 1.0, y)
    z = reciprocal(y * y)
    p = z * 0.08333333333333333 - 0.021092796092796094
    p = p * z + 0.007575757575757576
    p = p * z - 0.004166666666666667
    p = p * z + 0.003968253968253968
    p = p * z - 0.008333333333333333
    p = p * z + 0.08333333333333333
    p = tl.where(y < 1.0e17, p * z, 0.0)
    series = libdevice.log(y) - reciprocal(y) * 0.5 - p + total
    result = tl.where(below & (x == whole), float("nan"), series)
    return tl.where(x == 0.0, libdevice.copysign(x * 0.0 + float("inf"), x * -1.0), result)


@triton.jit
def to_tf32(x):  # the nearest: the matrix unit cuts the other bits off
    bits = tl.inline_asm_elementwise(
        "cvt.rna.tf32.f32 $0, $1;", "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1
    )
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def start_next_launch():  # its programs may start where there is room: they wait by themselves
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;",
        "=r", [], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def wait_for_launch_before():  # until it has ended and all that it wrote can be read
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;",
        "=r", [], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def cluster_arrive():  # with cluster_wait: all programs of the cluster have started
    tl.inline_asm_elementwise(
        "barrier.cluster.arrive.relaxed.aligned; mov.u32 $0, 0;",
        "=r", [], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def cluster_wait():
    tl.inline_asm_elementwise(
        "barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;",
        "=r", [], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def of_cluster(x, ranks):  # x of each program of the cluster, through their shared memory
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 slots, other, rank;
        .shared .align 4 .b8 exchanged[64];
        mov.u32 slots, exchanged;
        mov.u32 rank, %cluster_ctarank;
        mapa.shared::cluster.u32 other, slots, $2;
        mad.lo.u32 other, rank, 4, other;
        st.shared::cluster.f32 [other], $1;
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        mad.lo.u32 slots, $2, 4, slots;
        ld.shared.f32 $0, [slots];
        }""",
        "=f,f,r", [x, ranks], dtype=tl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def both_of_cluster(x, y, ranks):  # the same for two values
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 slots, other, rank;
        .shared .align 8 .b8 exchanged[128];
        mov.u32 slots, exchanged;
        mov.u32 rank, %cluster_ctarank;
        mapa.shared::cluster.u32 other, slots, $4;
        mad.lo.u32 other, rank, 8, other;
        st.shared::cluster.v2.f32 [other], {$2, $3};
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        mad.lo.u32 slots, $4, 8, slots;
        ld.shared.v2.f32 {$0, $1}, [slots];
        }""",
        "=f,=f,f,f,r", [x, y, ranks], dtype=(tl.float32, tl.float32), is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def widen_bfloat16(x):  # two to a register: one instruction each, a conversion is three for two
    bits = tl.inline_asm_elementwise(
        "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }",
        "=r,=r,r", [x], dtype=tl.int32, is_pure=True, pack=2,
    )  # fmt: skip
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def again(x):  # 16-bit values as they are; the compiler can't tell, so it won't keep them widened
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2
    )


# ---- float32 values on their way to a half type: some units of float32 off, few instructions -----


@triton.jit
def fast_exp2(x):  # results below the normal range are zero: one instruction, tl.exp2 is four
    return tl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def fast_reciprocal(x):
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def coarse_exp(x):
    return fast_exp2(x * 1.4426950408889634)


@triton.jit
def coarse_exp_above(x, base):  # exp(x - y), where base is y * log2(e)
    return fast_exp2(x * 1.4426950408889634 - base)


@triton.jit
def coarse_sigmoid(x):
    return fast_reciprocal(1.0 + fast_exp2(x * -1.4426950408889634))


@triton.jit
def coarse_tanh(x):  # 1 - 2 / (exp(2 x) + 1); near 0, where that cancels, x - x^3 / 3 + 2 x^5 / 15
    square = x * x
    near = x + x * square * (square * 0.13333333 - 0.33333334)
    far = 1.0 - 2.0 * fast_reciprocal(1.0 + fast_exp2(x * 2.8853900817779268))
    return tl.where(tl.abs(x) < 0.125, near, far)


@triton.jit
def coarse_erf(x):  # 1 - erfc(|x|), log2 of it by a polynomial: relative error below 1e-4
    t = tl.abs(x)
    p = t * (t * (t * 0.0022652273 - 0.026445782) + 0.14404859) + 0.92070544
    far = libdevice.copysign(1.0 - fast_exp2(t * -1.0 * (t * p + 1.6277664)), x)
    return tl.where(t < 0.01, x * 1.1283792, far)
