"""Who computes what kernels exist for: the backend's own operations, or the shared Triton kernels."""

IMPLEMENTATIONS = ("auto", "reference", "triton")
"""``auto`` is triton on a CUDA device and reference elsewhere; triton on a CPU is Triton's interpreter."""

MAX_KERNEL_STREAMS = 8
"""Residual streams kernels are written for."""


def uses_kernels(impl: str, on_cuda: bool) -> bool:
    """Whether kernels compute.

    Raises:
        ValueError: no implementation has that name.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl: expected one of {IMPLEMENTATIONS}, got {impl!r}")
    return impl == "triton" or (impl == "auto" and on_cuda)
