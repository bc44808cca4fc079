"""A process that launches kernels nobody has run yet (pool.py's child): one that reads a wrong
address, or never ends, takes this process with it and nothing else.

A job has `built` (a pickled Built), `device` (the GPU's index) and `tensors`: element type, bytes
and filling of what each pointer points to. The answer has `problem`, "" where all went well; behind
an error of the GPU's the process is of no more use and says `spent`.
"""

from __future__ import annotations

import base64
import pickle

import torch

from onchip.backends.nvidia.pool import Job
from onchip.backends.nvidia.worker import serve
from onchip.errors import OnchipError

MARGIN = 4096  # bytes around each tensor that a kernel must leave as they are
_MARK = 0xA5


def run_job(job: Job) -> Job:
    """Launch a kernel once, on memory of this process."""
    built = pickle.loads(base64.b64decode(job["built"]))
    try:
        with torch.cuda.device(job["device"]):
            memory = [_memory(*t) for t in job["tensors"]]
            built.launcher(job["device"]).run(
                [m.data_ptr() + MARGIN for m in memory], torch.cuda.current_stream().cuda_stream
            )
            torch.cuda.synchronize()
            spoilt = [n for n, m in enumerate(memory) if _spoilt(m)]
    except (OnchipError, RuntimeError) as error:
        return {"problem": str(error).split("\n", 1)[0], "spent": not _usable()}
    if spoilt:
        return {"problem": f"it writes beyond the memory of its tensors {spoilt}", "spent": False}
    return {"problem": "", "spent": False}


def _memory(dtype: str, nbytes: int, filling: str) -> torch.Tensor:
    """The bytes of one tensor, with a margin on both sides. Values of floating point are normal
    ones (infinities would hide in a product of zeros), indices are zero, so that they are valid."""
    out = torch.full((nbytes + 2 * MARGIN,), _MARK, dtype=torch.uint8, device="cuda")
    inside, kind = out[MARGIN : MARGIN + nbytes], getattr(torch, dtype)
    if filling == "poison":
        inside.fill_(0xFF)  # NaN in every type of floating point
    elif filling == "values" and kind.is_floating_point:
        inside.view(kind).normal_()
    else:
        inside.zero_()
    return out


def _spoilt(memory: torch.Tensor) -> bool:
    before, after = memory[:MARGIN], memory[-MARGIN:]
    return bool((before != _MARK).any() or (after != _MARK).any())


def _usable() -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


if __name__ == "__main__":
    serve(run_job)
