"""The text of one engine kernel: sizes and an epilogue around the main loop of `include/`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil, prod

from onchip.backends.cuda import packed_sizes, totals
from onchip.backends.cuda.classes import class_shifts, tap_tables
from onchip.backends.cuda.epilogue import epilogue_text
from onchip.backends.cuda.geometry import BLOCK, GROUP, ROW_COLUMNS, ROW_PITCH, Geometry
from onchip.backends.cuda.limits import refusal
from onchip.backends.cuda.maps import Maps
from onchip.backends.cuda.packed import PackedGeometry, geometry
from onchip.backends.cuda.parts import at_once
from onchip.backends.cuda.problem import Config, Line, Problem
from onchip.backends.cuda.registers import HELPING, available, handed_on, part_groups
from onchip.backends.cuda.source import CudaSource, Further, Pointer, Strides
from onchip.backends.cuda.spelling import STORAGE
from onchip.backends.cuda.weights import packed_weights
from onchip.backends.nvidia.source import Workspace
from onchip.fusion.machine import HOPPER, Gpu
from onchip.fusion.refusal import Refusal, Rule
from onchip.ir.dtype import DType
from onchip.ir.expr import Tensor

LINES = 4  # that the main loop counts; those that a problem lacks have one element
INSTRUCTIONS = {
    "bf16": ("bf16", 16), "fp16": ("f16", 16), "tf32": ("tf32", 8), "tf32x3": ("tf32", 8),
}  # fmt: skip
NEAR = 16  # tiles of features that follow each other over the same positions, at most


def emit(
    problem: Problem,
    config: Config,
    gpu: Gpu,
    strides: Mapping[Tensor, Strides],
    name: str = "contraction",
    comment: str = "",
    late: frozenset[Tensor] = frozenset(),
) -> CudaSource | Refusal:
    """The kernel of a problem by one choice. strides: elements, of every tensor; late: inputs that
    are derived at load."""
    g = geometry(problem, config)
    if gpu.capability != HOPPER:
        text = f"sm_{gpu.capability}: there is a main loop for sm_{HOPPER} only"
        return Refusal(Rule.CONTRACTION_FORM, problem.subject, text)
    if problem.kind not in INSTRUCTIONS:
        text = f"no main loop for {problem.kind}"
        return Refusal(Rule.CONTRACTION_FORM, problem.subject, text)
    refused = refusal(g, gpu.shared_bytes)
    if refused:
        return refused
    return _Emitter(g, gpu, strides, name, comment, late).source()


class _Emitter:
    def __init__(
        self,
        g: Geometry,
        gpu: Gpu,
        strides: Mapping[Tensor, Strides],
        name: str,
        comment: str,
        late: frozenset[Tensor],
    ) -> None:
        self.g, self.p, self.c = g, g.problem, g.config
        self.gpu, self.strides, self.name, self.comment = gpu, strides, name, comment
        self.rows = g if isinstance(g, PackedGeometry) else None
        packed = self.rows.weights if self.rows else lambda: packed_weights(self.p, g.chunk)
        self.w = packed() if self.p.w_constant else self.p.w
        # the weights' tensor among the inputs is the one that the kernel reads
        read = dict.fromkeys([self.p.x, *(r.tensor for r in self.p.reads), self.w])
        derived = late | ({self.w} if self.p.w_constant else set())
        self.inputs = tuple(sorted(read, key=lambda t: t in derived))
        self.outputs = tuple(dict.fromkeys(r.tensor for r in (*self.p.results, *self.p.finals)))
        self.numbers = {t: n for n, t in enumerate((*self.inputs, *self.outputs))}

    def pointer(self, t: Tensor) -> str:
        return f"t{self.numbers[t]}"

    # ---- the text ------------------------------------------------------------------------------

    def source(self) -> CudaSource:
        p, g = self.p, self.g
        self.epilogue = epilogue_text(p, self.pointer, self.strides, not g.staged)
        self.reads = g.tile_reads
        seen = Maps(g, self.strides, self.numbers)
        maps = [*([] if self.rows else [seen.x()]), seen.w(self.w)]
        tiled = [r for r in p.results if r.tile]
        maps += [m for r in tiled for m in seen.tiles(r.tensor, r.index, r.pooled)]
        maps += [m for r in self.reads for m in seen.tiles(r.tensor, r.index, p.pools)]
        pointers = tuple(Pointer(n) for n in range(len(self.numbers) + bool(p.totals)))
        # the engine's own loop stands beside the packed form's, and has its instruction
        held = (False, True) if self.rows and self.rows.w_held else (p.splits,)
        text = "\n\n".join(
            [
                "".join(f"// {line}\n" for line in self.comment.splitlines())
                + f"// {self.c.label}",
                "#include <onchip/hopper.cuh>",
                "#include <onchip/scalar.cuh>",
                self._sizes(),
                self._arguments(),
                "struct Place {\n    int batch, feature, at[4];\n};",
                *["#ifndef ONCHIP_LAUNCH"] * bool(p.totals),
                self.epilogue.text,
                self._dispatch(),
                *map(self._product, held),
                *self._engine(),
                self._function(len(tiled)),
                *self._second(),
            ]
        )
        further, workspace = (), ()
        if p.totals:
            name, threads = self.second, 32 * totals.warps(g)
            further = (Further(name, pointers, totals.programs(g), threads),)
            workspace = (Workspace(totals.workspace_bytes(g)),)
        return CudaSource(
            text,
            self.name,
            (*maps, *pointers),
            self.programs,
            g.threads,
            g.shared_bytes,
            self.inputs,
            self.outputs,
            workspace,
            cluster=self.c.cluster,
            further=further,
        )

    @property
    def second(self) -> str:
        """The name of the second launch."""
        return f"{self.name}_totals"

    def _second(self) -> list[str]:
        if not self.p.totals:
            return []
        taken, fields = self._pointers()
        own = totals.text(self.p, self.second, self.pointer, self.strides, taken, fields)
        return ["#else", own, "#endif"]

    @property
    def programs(self) -> int:
        """Of the launch: one a multiprocessor, each with the same tiles of features if its weights
        stay; of those that share a tile's channels, one for each part."""
        cluster = self.c.cluster
        if self.c.k_split > 1:
            return self.g.work * cluster
        if self.rows:
            share = max(self.gpu.multiprocessors // self.g.feature_tiles, 1)
            return min(share, self.g.position_tiles) * self.g.feature_tiles
        most = self.gpu.multiprocessors // cluster
        if not self.c.w_stages:
            features = ceil(self.g.feature_tiles / self.c.x_shared)
            most = max(most // features, 1) * features
        return min(self.g.work, most) * cluster

    def _sizes(self) -> str:
        g, p, c = self.g, self.p, self.c
        features = ceil(g.feature_tiles / c.x_shared)
        near = max(n for n in range(1, NEAR + 1) if features % n == 0)
        if not c.w_stages:
            near = features
        taps, begins, own_begins = tap_tables(g)
        reads = [r.tensor.dtype.size for r in self.reads]
        blocks = [g.result_bytes(prod(g.cells), size) for size in reads]
        starts = [c.blocks * sum(blocks[:n]) for n in range(len(blocks))]
        read = sum(prod(g.cells) * BLOCK * s for s in reads) * c.blocks * c.split
        scalars = {
            "TEAMS": c.teams, "SPLIT": c.split, "BLOCKS": c.blocks, "ALONG": c.along,
            "GROUPS": g.groups, "STRIPS": len(g.strips), "GROUP_ROWS": g.group_rows,
            "ROW": c.row_bytes, "CHUNK": g.chunk, "CHUNKS": g.chunks, "K_STEPS": g.k_steps,
            "TAPS": p.taps, "PHASES": len(g.phases), "LINES": len(p.lines),
            "X_SLOT": g.x_slot, "X_BYTES": g.x_bytes, "X_STAGES": c.x_stages,
            "X_RANK": 1 + len(p.lines) + (p.matrices > 1), "BATCH": p.batch,
            "BATCHED": int(p.matrices > 1),
            "CLASSES": p.classes, "UNLIKE": int(p.unlike), "UNEVEN": int(p.uneven),
            "CLASS_TURN": max(self.programs // (c.cluster * near * p.classes), 1),
            "PIECES": g.pieces, "PIECE": g.piece, "OUTERMOST": g.outermost,
            "W_BYTES": g.w_bytes, "W_STAGES": c.w_stages, "W_PACKED": int(p.w_constant),
            "W_RANK": 2 if p.w_constant or p.batch == 1 else 3,
            "W_INNER": int(p.w_features_inner), "W_COPIES": g.w_copies, "W_ROW": g.w_row,
            "W_K_STEP": g.w_k_step, "SPLITS": int(p.splits), "PART_GROUPS": part_groups(g),
            "HELPING": HELPING, "REGISTERS": available(g) * handed_on(g),
            "FEATURES": p.features, "FEATURE_TILES": g.feature_tiles, "FEATURE_GROUP": near,
            "POSITION_TILES": g.position_tiles, "WORK": g.work,
            "CLUSTER": c.cluster, "K_SPLIT": c.k_split,
            "EXCHANGE_BYTES": g.exchange_bytes, "AT_ONCE": int(at_once(g)),
            "X_SHARED": c.x_shared, "W_SHARED": c.w_shared, "TURNS": int(g.turns),
            "TILE_BYTES": g.tile_bytes, "READ_BYTES": g.read_bytes, "R_STAGES": g.r_stages,
            "IN_PLACE": int(g.in_place), "ROW_COLUMNS": ROW_COLUMNS,
            "ROW_PITCH": ROW_PITCH,
            "TILE_RANK": 1 + len(p.lines) + (p.matrices > 1),
            "READS": len(reads), "READ_TX": read,
            "RESULTS": len(p.results), "STAGED": int(g.staged), "WIDE": int(g.wide),
            "FOLDED": int(g.carried),
        }  # fmt: skip
        scalars |= totals.sizes(g)
        half = any(r.tensor.dtype is DType.F16 for r in (*p.results, *p.reads))
        lines = [*p.lines, *[Line(1, 1, 1, cells=1)] * (LINES - len(p.lines))]
        # windows that overlap are disjoint once neighbours have handed on theirs
        carried = self.rows is not None and self.rows.carried
        arrays = {
            "STRIP_ROW": g.strips,
            "PHASE_BEGIN": begins,
            "CLASS_BEGIN": own_begins,
            "PATCH": _padded(c.patch),
            "CELLS": _padded(g.cells),
            "TILES": _padded(g.tiles),
            "STRIDE": [x.stride for x in lines],
            "HOP": [x.hop for x in lines],
            "LEAD": [0 if carried else x.lead for x in lines],
            "WINDOW": [x.hop if carried else x.window for x in lines],
            "POSITIONS": [x.positions for x in lines],
            "ALL_CELLS": [x.cells if p.pools else x.positions for x in lines],
            "APART": [int(x.apart) for x in lines],
            "RESULT_SIZE": [r.tensor.dtype.size for r in p.results] or [0],
            "RESULT_POOLED": [int(r.pooled and p.pools) for r in p.results] or [0],
            "RESULT_TILE": [int(r.tile) for r in p.results] or [0],
            "RESULT_SIDE": [r.side for r in p.results] or [0],
            "READ_SIZE": reads or [0],
            "READ_AT": starts or [0],
            "READ_BLOCK": blocks or [0],
        }
        out = [f"constexpr int {k} = {v};" for k, v in scalars.items()]
        out += [f"constexpr char FOLD = {totals.FOLDS[p.fold if p.pools else '']};"]
        out += [f"constexpr char HALF = '{'h' if half else 'b'}';"]
        out += [f"__device__ constexpr int {k}[] = {_list(v)};" for k, v in arrays.items()]
        folded = ", ".join(totals.FOLDS[t.fold] for t in p.totals) or "0"
        out.append(f"__device__ constexpr char TOTAL_FOLD[] = {{{folded}}};")
        tables = {
            "START": ([phase.start for phase in g.phases], 0),
            "SHIFT": (class_shifts(p), 0),
            "LENGTH": ([p.lengths_of(n) for n in range(p.classes)], 1),
        }
        for k, (v, by) in tables.items():
            rows = ", ".join(_list(_padded(row, by)) for row in v)
            out.append(f"__device__ constexpr int {k}[][{LINES}] = {{{rows}}};")
        for k, n in (("TAP_ROWS", 0), ("TAP_NUMBER", 1)):
            out.append(f"__device__ constexpr int {k}[] = {_list([t[n] for t in taps])};")
        return "namespace cfg {\n" + "\n".join(out) + "\n}"

    def _engine(self) -> tuple[str, ...]:
        """The main loop, with the sizes that it alone has."""
        if self.rows is None:
            return ("#include <onchip/engine.cuh>",)
        sizes = [f"constexpr int {k} = {v};" for k, v in packed_sizes.constants(self.rows).items()]
        arrays = packed_sizes.tables(self.rows).items()
        sizes += [f"__device__ constexpr int {k}[] = {_list(v)};" for k, v in arrays]
        text = "namespace packed_cfg {\n" + "\n".join(sizes) + "\n}"
        return text, "#include <onchip/packed.cuh>"

    def _arguments(self) -> str:
        fields, _ = self._pointers()
        partials = "a.partials" if self.p.totals else "nullptr"
        return (
            "struct Args {\n" + "\n".join(f"    {f};" for f in fields) + "\n};\n"
            f"DEVICE float* partials(const Args& a) {{ return {partials}; }}"
        )

    def _dispatch(self) -> str:
        """The results by number, and how one element, or some neighbouring ones, is stored."""
        values, puts, all_puts = [], [], []
        for n, r in enumerate(self.p.results):
            values.append(f"    if constexpr (R == {n}) return result{n}(a, acc, c, at, tile);")
            where = f"a.{self.pointer(r.tensor)} + element{n}(at)"
            half = "b" if r.tensor.dtype is DType.BF16 else "h"
            if r.tensor.dtype is DType.F32:
                store = f"*({where}) = v;"
                several = (
                    "if constexpr (N == 2) *(float2*)to = make_float2(v[0], v[1]); "
                    "else *(float4*)to = make_float4(v[0], v[1], v[2], v[3]);"
                )
            else:
                pack = "pack_bf16" if half == "b" else "pack_fp16"
                store = f"*({where}) = (u16){pack}(v, 0.f);"
                several = (
                    f'u32 w[N / 2]; _Pragma("unroll") for (int i = 0; i < N / 2; i++) '
                    f"w[i] = {pack}(v[2 * i], v[2 * i + 1]); "
                    "if constexpr (N == 8) *(uint4*)to = make_uint4(w[0], w[1], w[2], w[3]); "
                    "else if constexpr (N == 4) *(uint2*)to = make_uint2(w[0], w[1]); "
                    "else *(u32*)to = w[0];"
                )
            puts.append(f"    if constexpr (R == {n}) {store}")
            all_puts.append(f"    if constexpr (R == {n}) {{ auto* to = {where}; {several} }}")
        takes = "const Args& a, float acc, const Features& c, const Place& at, const float* tile"
        return "\n".join(
            [
                f"template <int R>\nDEVICE float result({takes}) {{",
                *values,
                "}",
                f"template <int K>\nDEVICE float total({takes}) {{",
                *(
                    f"    if constexpr (K == {n}) return total{n}(a, acc, c, at, tile);"
                    for n in range(len(self.p.totals))
                ),
                "}",
                "template <int R>\nDEVICE void put(const Args& a, const Place& at, float v) {",
                *puts,
                "}",
                "template <int R, int N>\n"
                "DEVICE void put_all(const Args& a, const Place& at, const float (&v)[N]) {",
                *all_puts,
                "}",
            ]
        )

    def _product(self, held: bool) -> str:
        """One instruction: 64 features by the columns of a strip (or of a part of it), 32 bytes of
        channels. held: weights come from registers."""
        p, g = self.p, self.g
        n = GROUP * part_groups(g) if p.splits else g.columns
        kind, depth = INSTRUCTIONS[p.kind]
        half = n // 2
        regs = ", ".join(f"%{i}" for i in range(half))
        outs = ", ".join(f'"+f"(d[{i}])' for i in range(half))
        order = "" if p.size == 4 else ", 0" if held else f", {int(p.w_features_inner)}, 0"
        takes, words = ("const u32 (&a)[4]", 4) if held else ("u64 a", 1)
        a = ", ".join(f"%{half + i}" for i in range(words))
        given = ", ".join(f'"r"(a[{i}])' for i in range(words)) if held else '"l"(a)'
        return (
            f"DEVICE void product(float (&d)[{half}], {takes}, u64 b, u32 add) {{\n"
            f'    asm volatile(\n        "{{\\n.reg .pred p;\\n'
            f'setp.ne.u32 p, %{half + words + 1}, 0;\\n"\n'
            f'        "wgmma.mma_async.sync.aligned.m{BLOCK}n{n}k{depth}.f32.{kind}.{kind} "\n'
            f'        "{{{regs}}}, "\n'
            f'        "{f"{{{a}}}" if held else a}, %{half + words}, p, 1, 1{order};\\n}}"\n'
            f'        : {outs}\n        : {given}, "l"(b), "r"(add));\n}}'
        )

    def _function(self, results: int) -> str:
        several = range(self.p.classes)
        maps = [*([] if self.rows else ["x"]), "w"]
        maps += [f"result{n}_{c}" for n in range(results) for c in several]
        maps += [f"read{n}_{c}" for n in range(len(self.reads)) for c in several]
        taken = [f"const __grid_constant__ TensorMap {m}_map" for m in maps]
        pointers, fields = self._pointers()
        taken += pointers
        places, at = [], 0
        for r in self.p.results:
            places.append(f"&result{at}_0_map" if r.tile else "nullptr")
            at += r.tile
        reads = [f"&read{n}_0_map" for n in range(len(self.reads))] or ["nullptr"]
        own = f"    const TensorMap* const reads[] = {{{', '.join(reads)}}};\n"
        call = own + "    engine::run(a, &x_map, &w_map, results, reads);"
        if self.rows:
            call = f"    packed::run(a, a.{self.pointer(self.p.x)}, &w_map, results);"
        head = ",\n    ".join(taken)
        return "\n".join(
            [
                f'extern "C" __global__ void __launch_bounds__({self.g.threads}, 1) {self.name}(',
                f"    {head}) {{",
                f"    const Args a = {{{', '.join(fields)}}};",
                f"    const TensorMap* const results[] = {{{', '.join(places or ['nullptr'])}}};",
                call,
                "}",
            ]
        )

    def _pointers(self) -> tuple[list[str], list[str]]:
        """Parameters that are pointers, and their names, which Args has in this order."""
        taken = [f"const {STORAGE[t.dtype]}* {self.pointer(t)}" for t in self.inputs]
        taken += [f"{STORAGE[t.dtype]}* {self.pointer(t)}" for t in self.outputs]
        taken += ["float* partials"] * bool(self.p.totals)
        return taken, [x.split()[-1] for x in taken]


def _padded(values: Iterable[int], by: int = 1) -> list[int]:
    got = list(values)
    return got + [by] * (LINES - len(got))


def _list(values: Iterable[int]) -> str:
    return "{" + ", ".join(map(str, values)) + "}"
