"""Triton kernels shared by both backends, and the backends that PyTorch and JAX call them through. See
docs/kernels.md.
"""
