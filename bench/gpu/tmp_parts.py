"""Durations of the launches of a case's variants."""
import sys, argparse
from pathlib import Path
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
import torch
from bench.gpu import region
from onchip.planning.generators import triton
from onchip.backends.triton.build import build_all
from onchip.report.bench_suites import SUITES
import re
torch.set_grad_enabled(False)
gen = triton.for_device(torch.device("cuda"))
for case in SUITES["memory"]:
    if not re.search(sys.argv[1], case.name): continue
    s = region.prepare(case, gen, region.Sweep())
    items = list(s.candidates.items())[: int(sys.argv[2])]
    built = build_all([c.source for _, c in items], gen.gpu)
    sets = region.on_device(s, "cuda", 1)
    for (label, c), b in zip(items, built):
        kernel = gen.kernel(c, b)
        m = region.memory_of(c, sets)
        p = [t.data_ptr() for t in region.tensors_of(c, m, sets, 0)]
        for _ in range(3): kernel.run(p)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as prof:
            for _ in range(5): kernel.run(p)
            torch.cuda.synchronize()
        seen = {}
        for e in prof.events():
            if e.device_type == torch.autograd.DeviceType.CUDA:
                seen.setdefault(e.name, []).append(e.device_time)
        print(case.name, label[:150])
        regs = {l.name: (l.programs, l.warps, r.registers) for l, r in zip(b.launches, b.resources)}
        for k, v in seen.items():
            print(f"   {k:40} {sorted(v)[len(v)//2]:9.2f} us", regs.get(k))
