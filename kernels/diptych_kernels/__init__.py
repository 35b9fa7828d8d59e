"""Triton kernels shared by both backends, with entry points for PyTorch and JAX; see docs/kernels.md."""
