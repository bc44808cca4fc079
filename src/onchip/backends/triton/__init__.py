"""Triton kernels from the loop nests that also feed the C++ emitter.

    Nest → placement (what stays in registers) → kernel.emit_kernel → a text file → build

One program computes one tile of the nest's root. A block value has one dimension per axis that its
expression mentions, padded to a power of two and masked. A first emitter: it proves that the
representation fits (tests/backends/test_triton_proof.py) and refuses what it cannot say. The
planner does not use it yet: tiles are chosen by one short rule, products are float32 (`ieee`) and
nothing is tuned. Only build.py imports triton and torch.
"""
