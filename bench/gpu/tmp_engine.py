"""Temporary: the engine by hand-made problems, without the planner."""
import sys, types, os, time, ctypes, itertools, math
from dataclasses import dataclass, replace
ROOT = os.path.dirname(os.path.abspath(__file__)) + "/../../src"
sys.path.insert(0, ROOT)
from onchip.backends.cuda.problem import *
from onchip.ir.expr import axis, given, Load, Axis
from onchip.ir.dtype import DType
from onchip.fusion.machine import GPUS
stub = types.ModuleType("onchip.backends.cuda.epilogue")
@dataclass
class Ep:
    text: str
    tile_reads: tuple
MODE = {}
def epilogue_text(p, pointer):
    m = MODE
    t = "struct Features { float bias, scale, shift; };\n"
    b, s, h = (pointer(x) for x in m["chan"])
    t += f"""DEVICE Features features(const Args& a, int batch, int feature) {{ return {{a.{b}[feature], a.{s}[feature], a.{h}[feature]}}; }}
DEVICE float before(const Args& a, float acc, const Features& c, const Place& at) {{ return fmaf(larger(acc + c.bias, 0.f), c.scale, c.shift); }}
DEVICE float result0(const Args& a, float acc, const Features& c, const Place& at, const float* tile) {{ return {'acc + tile[0]' if m.get('res') is not None else 'acc'}; }}"""
    return Ep(t, tuple(r for r in p.reads if r.kind == "tile"))
stub.epilogue_text = epilogue_text
try:
    import onchip.backends.cuda.epilogue
except ImportError:
    pass
sys.modules["onchip.backends.cuda.epilogue"] = stub
from onchip.backends.cuda import kernel as K
from onchip.backends.cuda.geometry import Geometry
from cuda.bindings import nvrtc

INC = ROOT + "/onchip/backends/cuda/include/onchip/"
def compile_(text, opts=()):
    heads = {f"onchip/{n}": open(INC + n).read() for n in ("hopper.cuh", "engine.cuh")}
    e, p = nvrtc.nvrtcCreateProgram(text.encode(), b"k.cu", len(heads), [v.encode() for v in heads.values()], [k.encode() for k in heads])
    o = [b"--gpu-architecture=sm_90a", b"--std=c++17", *opts]
    t = time.time(); (e,) = nvrtc.nvrtcCompileProgram(p, len(o), o); dt = time.time() - t
    _, n = nvrtc.nvrtcGetProgramLogSize(p); log = b" " * n; nvrtc.nvrtcGetProgramLog(p, log)
    if int(e): raise RuntimeError(log.decode(errors="replace")[:3000])
    _, n = nvrtc.nvrtcGetCUBINSize(p); cubin = b" " * n; nvrtc.nvrtcGetCUBIN(p, cubin)
    return cubin, dt, log.decode(errors="replace").strip("\0 \n")

@dataclass
class Shape:
    n: int; ci: int; hw: tuple; co: int; k: tuple; s: tuple; p: tuple; d: tuple; pool: tuple = ()   # pool: (window, hop, lead) per line innermost first
    kind: str = "bf16"; res: bool = False

DT = {"bf16": DType.BF16, "fp16": DType.F16, "tf32": DType.F32}
def problem(S):
    """hw etc. innermost first: (W, H)"""
    dt = DT[S.kind]
    L = len(S.hw)
    out = [(S.hw[l] + 2 * S.p[l] - S.d[l] * (S.k[l] - 1) - 1) // S.s[l] + 1 for l in range(L)]
    pool = S.pool or ((1, 1, 0),) * L
    cells = [(out[l] + 2 * pool[l][2] - pool[l][0]) // pool[l][1] + 1 for l in range(L)]
    chunk = 128 // (2 if dt is not DType.F32 else 4)
    taps = math.prod(S.k)
    x = given((S.n, *S.hw[::-1], S.ci), dt, "x")
    step = S.ci; lines = []
    for l in range(L):
        w, h, le = pool[l]
        lines.append(Line(S.hw[l], step, out[l], S.s[l], S.k[l], S.d[l], S.p[l], cells[l], w, h, le)); step *= S.hw[l]
    lines.append(Line(S.n, step, S.n, cells=S.n))
    w = given((taps, math.ceil(S.ci / chunk), S.co, chunk), dt, "w")
    f, b = axis(S.co, "f"), axis(1, "b")
    pa = tuple(axis(l.positions, "p") for l in lines); ca = tuple(axis(l.cells, "q") for l in lines)
    y = given((S.n, *cells[::-1], S.co), dt, "y")
    chan = [given((S.co,), DType.F32, n) for n in ("bias", "scale", "shift")]
    reads = [Read(t, (f,), None, "feature") for t in chan]
    ax = ca if S.pool else pa
    if S.res:
        r = given(y.shape, dt, "res"); reads.append(Read(r, (*ax[::-1], f), None, "tile")); MODE["res"] = r
    else: MODE["res"] = None
    MODE["chan"] = chan
    P = Problem(S.kind, x, w, S.ci, tuple(lines), S.co, 1, 0, 0, True, 0, 0, f, b, pa, ca, ACC, "max" if S.pool else "", (Result(y, (*ax[::-1], f), ACC, bool(S.pool), True),), tuple(reads))
    P_chan[id(P)] = (chan, MODE["res"])
    return P
P_chan = {}
def dense(shape):
    out, s = [], 1
    for n in reversed(shape): out.append(s); s *= n
    return tuple(out[::-1])
def build(P, C, dump=None):
    chan, res = P_chan[id(P)]; MODE["chan"], MODE["res"] = chan, res
    ts = [P.x, P.w, *[r.tensor for r in P.reads], *[r.tensor for r in P.results]]
    src = K.emit(P, C, GPUS["h200"], {t: dense(t.shape) for t in ts})
    if not isinstance(src, K.CudaSource): return src
    if dump: open(dump, "w").write(src.text)
    return src
P22 = ((2, 2, 0), (2, 2, 0)); P33 = ((3, 2, 1), (3, 2, 1))
def conv(n, ci, h, co, k=3, s=1, pool=(), kind="bf16", res=False, w=None, p=None, d=1):
    p = k // 2 * d if p is None else p
    return Shape(n, ci, (w or h, h), co, (k, k), (s, s), (p, p), (d, d), pool, kind, res)
def gemm(m, k, n, kind="bf16", res=False):
    return Shape(1, k, (m,), n, (1,), (1,), (0,), (1,), (), kind, res)
def conv1(n, ci, l, co, k, p, kind="bf16", pool=()):
    return Shape(n, ci, (l,), co, (k,), (1,), (p,), (1,), pool, kind)
CASES = {
 "A": (conv(32, 64, 56, 64, pool=P22), [Config((8, 14, 1), 1, teams=4, x_stages=6), Config((8, 14, 1), 1, teams=3, x_stages=5), Config((8, 28, 1), 1, teams=2, x_stages=3), Config((16,14,1),1,teams=2,x_stages=3)]),
 "A32": (conv(32, 64, 56, 64, pool=P22, kind="tf32"), [Config((8, 14, 1), 1, teams=2, x_stages=4, w_stages=6), Config((8, 28, 1), 1, teams=2, x_stages=3, w_stages=5), Config((16, 14, 1), 1, teams=2, x_stages=3, w_stages=5), Config((8,14,1),1,teams=2,x_stages=2)]),
 "C": (conv(128, 128, 28, 128, pool=P22), [Config((8, 28, 1), 1, split=2, x_stages=3, w_stages=5), Config((8, 14, 1), 1, split=2, teams=2, x_stages=4, w_stages=5), Config((8, 14, 1), 1, blocks=2, teams=2, x_stages=4, w_stages=4), Config((16,14,1),1,split=2,x_stages=3,w_stages=5)]),
 "D": (conv(32, 128, 56, 128, pool=P22), [Config((8, 14, 1), 1, split=2, x_stages=4, w_stages=7), Config((8, 28, 1), 1, split=2, x_stages=3, w_stages=5), Config((16, 14, 1), 1, split=2, x_stages=3, w_stages=5), Config((8, 14, 1), 1, split=2, teams=2, x_stages=4, w_stages=5)]),
 "E": (gemm(32 * 56 * 56, 64, 256, res=True), [Config((128, 1), 0, split=2, teams=1, x_stages=4, w_stages=0), Config((64, 1), 0, split=4, x_stages=6), Config((128, 1), 0, split=4, x_stages=3), Config((64, 1), 0, split=2, teams=2, x_stages=6, w_stages=0)]),
 "F": (gemm(32 * 56 * 56, 256, 64), [Config((128, 1), 0, teams=2, x_stages=6), Config((128, 1), 0, teams=3, x_stages=6), Config((64, 1), 0, teams=4, x_stages=12), Config((192,1),0,teams=2,x_stages=5)]),
 "G": (conv(32, 512, 7, 512), [Config((8, 7, 2), 1, split=2, x_stages=3, w_stages=5), Config((8, 7, 4), 1, split=2, x_stages=3, w_stages=5), Config((8, 7, 2), 1, split=2, x_stages=3, w_stages=5, k_split=2), Config((8,7,4),1,split=2,x_stages=2,w_stages=4,k_split=4)]),
 "H": (conv(1, 512, 7, 512, pool=P22), [Config((8, 8, 1), 1, split=1, x_stages=3, w_stages=8, k_split=16), Config((8, 8, 1), 1, split=1, x_stages=3, w_stages=12, k_split=18), Config((8, 8, 1), 1, split=2, x_stages=3, w_stages=8, k_split=32), Config((8, 8, 1), 1, split=1, x_stages=3, w_stages=8, k_split=8)]),
 "crepe2": (conv1(64, 1024, 128, 128, 64, 0, pool=((2, 2, 0),)), [Config((128, 1), 0, split=2, x_stages=3, w_stages=6, k_split=2), Config((128, 2), 0, split=2, x_stages=2, w_stages=5, k_split=4)]),
 "gemm": (gemm(8192, 8192, 8192), [Config((256, 1), 0, split=2, x_stages=4, w_stages=4), Config((128, 1), 0, blocks=2, split=2, x_stages=4, w_stages=4)]),
 # correctness of the rest
 "s2": (conv(3, 64, 15, 64, s=2), [Config((8, 8, 1), 1, x_stages=3, teams=2), Config((8, 4, 1), 1, x_stages=3, w_stages=3)]),
 "s2k1": (conv(2, 128, 14, 256, k=1, s=2, p=0), [Config((8, 7, 1), 1, split=2, x_stages=3, w_stages=3)]),
 "dil": (conv(2, 64, 13, 32, d=2), [Config((8, 8, 1), 1, x_stages=2, w_stages=3), Config((16, 3, 1), 0, x_stages=2, w_stages=3)]),
 "odd": (conv(1, 72, 11, 40, k=5, w=5), [Config((8, 11, 1), 1, x_stages=3, w_stages=4), Config((8, 4, 1), 0, x_stages=3, w_stages=4, teams=2)]),
 "pool3": (conv(2, 64, 17, 64, pool=P33), [Config((8, 9, 1), 1, x_stages=3, w_stages=4), Config((16, 7, 1), 1, x_stages=3, w_stages=4, teams=2)]),
 "pool3f": (conv(2, 64, 17, 64, pool=P33, kind="tf32"), [Config((8, 9, 1), 1, x_stages=3, w_stages=4)]),
 "fp16": (conv(2, 64, 9, 64, kind="fp16", res=True), [Config((8, 9, 1), 1, x_stages=3, w_stages=4)]),
 "res32": (conv(2, 64, 9, 64, kind="tf32", res=True), [Config((8, 9, 1), 1, x_stages=3, w_stages=4)]),
 "ks": (conv(2, 192, 9, 128, res=True), [Config((8, 9, 1), 1, split=2, x_stages=3, w_stages=4, k_split=5)]),
 "rb64": (conv(2, 32, 12, 64), [Config((8, 4, 1), 1, row_bytes=64, x_stages=3, w_stages=0, teams=2)]),
 "rb32": (conv(2, 16, 12, 64), [Config((8, 4, 1), 1, row_bytes=32, x_stages=3, w_stages=0)]),
}
CASES["crepe2"] = (replace(CASES["crepe2"][0], hw=(191,)), CASES["crepe2"][1])

if __name__ == "__main__" and "--build" in sys.argv:
    import re
    want = sys.argv[-1] if not sys.argv[-1].startswith("-") else "."
    from onchip.backends.triton import resources as R
    from pathlib import Path
    for name, (S, Cs) in CASES.items():
        if not re.fullmatch(want, name): continue
        for i, C in enumerate(Cs):
            P = problem(S)
            src = build(P, C, f"/tmp/eng_{name}_{i}.cu")
            if not isinstance(src, K.CudaSource): print(name, i, src); continue
            try: cubin, dt, log = compile_(src.text)
            except RuntimeError as e: print(name, i, "ERR", str(e)[:1500]); break
            open("/tmp/eng.cubin", "wb").write(cubin)
            r = R.examine(Path("/tmp/eng.cubin"), 90, src.shared_bytes, src.threads // 32, dt)
            print(f"{name:8s} {i} regs {r.registers} spills {r.spills} stack {r.stack_bytes} smem {src.shared_bytes} sass {r.instructions} {dt:.2f}s work {Geometry(P, C).work} programs {src.programs} {log[:300]}", flush=True)

# ---- on the device ------------------------------------------------------------------------------
def device_main(names, timing):
    import torch, torch.nn.functional as F
    torch.backends.cuda.matmul.allow_tf32 = True; torch.backends.cudnn.allow_tf32 = True
    cu = ctypes.CDLL("libcuda.so.1")
    torch.cuda.init(); torch.zeros(1, device="cuda")
    TD = {DType.BF16: torch.bfloat16, DType.F16: torch.float16, DType.F32: torch.float32}
    MK = {"bf16": 9, "fp16": 6, "fp32": 7}; SW = {0: 0, 32: 1, 64: 2, 128: 3}
    def chk(code, what):
        if code: raise RuntimeError(f"{what}: {code}")
    def encode(m, addr, esize):
        raw = (ctypes.c_uint8 * 192)(); a = (ctypes.addressof(raw) + 63) // 64 * 64
        n = len(m.sizes)
        chk(cu.cuTensorMapEncodeTiled(ctypes.c_void_p(a), MK[m.kind], n, ctypes.c_void_p(addr + m.offset * esize), (ctypes.c_uint64 * n)(*m.sizes), (ctypes.c_uint64 * max(n - 1, 1))(*m.strides), (ctypes.c_uint32 * n)(*m.box), (ctypes.c_uint32 * n)(*m.every), 0, SW[m.swizzle], 3, 0), f"encode {m}")
        return raw, a
    def flush_buf():
        return torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    big = flush_buf()
    def capture(f, n=1):
        s = torch.cuda.Stream(); s.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(s): f()
        torch.cuda.current_stream().wait_stream(s); torch.cuda.synchronize()
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g):
            for _ in range(n): f()
        return g
    def one(f, reps=40):
        g = capture(f); ts = []
        for _ in range(5): g.replay()
        for _ in range(reps):
            big.zero_()
            a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            a.record(); g.replay(); b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b) * 1e3)
        ts.sort(); return ts[len(ts) // 2]
    if timing: print(f"empty kernel {one(lambda: cu and torch.relu_(torch.zeros(8, device='cuda')) if False else tiny()):.1f}" if False else "", flush=True)
    for name in names:
        S, Cs = CASES[name]
        print(f"BEGIN {name}\n", end="", flush=True)
        L = len(S.hw); P0 = problem(S); td = TD[P0.x.dtype]
        g = torch.Generator("cuda").manual_seed(hash(name) % 1000)
        R = lambda *a: torch.randn(*a, device="cuda", dtype=torch.float32, generator=g)
        x = R(S.n, *S.hw[::-1], S.ci).to(td)
        w = (R(S.co, S.ci, *S.k[::-1]) * (S.ci * math.prod(S.k)) ** -0.5).to(td)
        b, sc, sh = R(S.co) * 0.5, R(S.co), R(S.co)
        conv = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[L]
        xn = x.movedim(-1, 1)
        def post(c):
            v = torch.relu(c + b.view(-1, *[1] * L).to(c.dtype)) * sc.view(-1, *[1] * L).to(c.dtype) + sh.view(-1, *[1] * L).to(c.dtype)
            if S.pool:
                k = [p[0] for p in S.pool[::-1]]; h = [p[1] for p in S.pool[::-1]]; l = [p[2] for p in S.pool[::-1]]
                v = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}[L](v, k, h, l)
            return v
        bigmm = math.prod(S.hw) * S.n * S.co * S.ci * math.prod(S.k) > 4e11
        rd = torch.float32 if bigmm else torch.float64
        if bigmm: torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        step = max(1, 1 << 22 if False else S.n)
        ref = post(conv(xn.to(rd), w.to(rd), None, S.s[::-1], S.p[::-1], S.d[::-1])).movedim(1, -1)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        res = R(*ref.shape).to(td) if S.res else None
        if S.res: ref = ref + res.to(rd)
        if timing:
            xc = xn.contiguous(memory_format=torch.channels_last) if L == 2 else xn
            wc = w.contiguous(memory_format=torch.channels_last) if L == 2 else w
            f = (lambda: x[0] @ w.view(S.co, S.ci).t()) if L == 1 and S.k == (1,) else (lambda: conv(xc, wc, None, S.s[::-1], S.p[::-1], S.d[::-1]))
            print(f"{name:8s} library bare {one(f):8.1f} us", flush=True)
        for i, C in enumerate(Cs):
            P = problem(S); src = build(P, C)
            if not isinstance(src, K.CudaSource): print(name, i, src); continue
            cubin, dt, log = compile_(src.text)
            chunk = P.w.shape[-1] if C.row_bytes == 128 else C.row_bytes // P.size
            cch = math.ceil(S.ci / chunk)
            wp = torch.zeros(S.co, cch * chunk, *S.k[::-1], device="cuda", dtype=td); wp[:, :S.ci] = w
            wp = wp.reshape(S.co, cch, chunk, -1).permute(3, 1, 0, 2).contiguous()
            y = torch.full(ref.shape, float("nan"), device="cuda", dtype=td)
            chan, rt = P_chan[id(P)]
            T = {P.x: x, P.w: wp, chan[0]: b, chan[1]: sc, chan[2]: sh, P.results[0].tensor: y}
            if rt is not None: T[rt] = res
            mem = [T[t] for t in (*src.inputs, *src.outputs)] + [torch.zeros(ws.nbytes, dtype=torch.uint8, device="cuda") if ws.zeroed else torch.full((ws.nbytes,), 255, dtype=torch.uint8, device="cuda") for ws in src.workspace]
            mod, fn = ctypes.c_void_p(), ctypes.c_void_p()
            chk(cu.cuModuleLoadData(ctypes.byref(mod), cubin), "load"); chk(cu.cuModuleGetFunction(ctypes.byref(fn), mod, src.name.encode()), "get")
            chk(cu.cuFuncSetAttribute(fn, 8, src.shared_bytes), "smem")
            keep, ptrs = [], []
            for q in src.parameters:
                if isinstance(q, K.TensorMap):
                    raw, a = encode(q, mem[q.n].data_ptr(), mem[q.n].element_size()); keep.append(raw); ptrs.append(a)
                else:
                    v = ctypes.c_uint64(mem[q.n].data_ptr()); keep.append(v); ptrs.append(ctypes.addressof(v))
            arr = (ctypes.c_void_p * len(ptrs))(*ptrs)
            def run():
                chk(cu.cuLaunchKernel(fn, src.programs, 1, 1, src.threads, 1, 1, src.shared_bytes, ctypes.c_void_p(torch.cuda.current_stream().cuda_stream), arr, None), "launch")
            run(); torch.cuda.synchronize()
            err = ((y.to(rd) - ref).norm() / ref.norm()).item(); bad = int((~torch.isfinite(y)).sum())
            y.fill_(float("nan")); run(); torch.cuda.synchronize(); err2 = ((y.to(rd) - ref).norm() / ref.norm()).item()
            zero_ok = all(not w_.zeroed or not bool(m.any()) for w_, m in zip(src.workspace, mem[-len(src.workspace):] if src.workspace else []))
            t = f"{one(run):8.1f} us" if timing else ""
            print(f"{name:8s} {i} err {err:.1e} {err2:.1e} bad {bad} {'' if zero_ok else 'COUNTERS'} {t}  {C.label} {log[:60]}", flush=True)
        del x, w, ref

if __name__ == "__main__" and "--run" in sys.argv:
    import subprocess, re, threading
    timing = "--time" in sys.argv
    names = [n for n in CASES if re.fullmatch(sys.argv[-1], n)]
    if "--child" in sys.argv:
        device_main(os.environ["NAMES"].split(","), timing); sys.exit(0)
    while names:
        p = subprocess.Popen([sys.executable, *sys.argv[:-1], "--child", sys.argv[-1]], env={**os.environ, "NAMES": ",".join(names)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        timer = threading.Timer(int(os.environ.get("QUIET", "100")), p.kill); timer.start()
        last = names[0]; tail = []
        for line in p.stdout:
            if line.startswith("BEGIN "): last = line.split()[1]; timer.cancel(); timer = threading.Timer(int(os.environ.get("QUIET", "100")), p.kill); timer.start()
            elif re.match(r"\w+ +(\d|lib)", line): print(line, end="", flush=True)
            else: tail.append(line)
        code = p.wait(); timer.cancel()
        if code == 0: break
        print(f"FAILED in {last} code {code}: {''.join(tail[-3:])[:600]}", flush=True)
        names = names[names.index(last) + 1:]
