"""Triton kernels from the loop nests that also feed the C++ emitter.

    Nest → placement (what stays in registers) → kernel.emit_kernel → a text file
    → build (pool, worker: child processes) → resources → launcher

One program computes a tile of the nest's root, or several side by side. A block value has one
dimension per axis that its expression mentions, padded to a power of two and masked. What it cannot
say is refused. Triton is imported by worker.py only (and by functions.py, which is read as text),
torch by launcher.py only.
"""
