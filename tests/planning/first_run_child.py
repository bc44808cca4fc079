"""Stands for the process that tries kernels: does what a job's name says."""

import os
import signal
import sys
import time

from onchip.backends.nvidia.worker import serve

if "broken" in sys.argv[0] or os.environ.get("ONCHIP_TEST_BROKEN_CHILD"):
    sys.exit(3)


def run_job(job):
    match job["name"]:
        case "dies":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hangs":
            time.sleep(600)
        case "wrong address":
            return {"problem": "an illegal memory access was encountered", "spent": True}
        case "beyond":
            return {"problem": f"it writes beyond {job['tensors']}", "spent": False}
        case "raises":
            raise RuntimeError("out of memory")
    return {"problem": "", "spent": False, "process": os.getpid()}


if __name__ == "__main__":
    serve(run_job)
