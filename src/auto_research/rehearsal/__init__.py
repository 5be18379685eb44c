"""A virtual CUDA device for PyTorch on a CPU-only build."""
