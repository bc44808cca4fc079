"""What every backend for NVIDIA GPUs needs: compilers in child processes (pool, worker), binaries
by content (cache), what they need of a multiprocessor (resources), and their launches (launcher).

Only launcher.py imports torch.
"""
