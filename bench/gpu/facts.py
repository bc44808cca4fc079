"""What the machine is: GPU, versions, copy ceiling, cost of a graph's node."""

import torch

from onchip.report import bench_replay as replay

p = torch.cuda.get_device_properties(0)
print(f"{p.name}, sm_{p.major}{p.minor}, {p.multi_processor_count} multiprocessors")
print(f"L2 {p.L2_cache_size >> 20} MiB, memory {p.total_memory >> 30} GiB")
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}")
print(f"copy {replay.copy_gbs():,.0f} GB/s, an operator in a graph {replay.node_us():.2f} us")
