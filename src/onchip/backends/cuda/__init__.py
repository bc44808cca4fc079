"""Contractions on tensor cores: one main loop for each generation of NVIDIA GPUs in CUDA C++
(include/), everything behind it generated from the region's expressions."""
