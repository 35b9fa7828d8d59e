"""Who computes what kernels exist for: the backend's own operations, or the shared Triton kernels."""

IMPLEMENTATIONS = ("auto", "reference", "triton")
"""``auto`` is triton on a CUDA device and reference elsewhere; triton on a CPU is Triton's interpreter."""

MAX_KERNEL_STREAMS = 8
"""Residual streams kernels are written for."""

MAX_KERNEL_CHANNELS = 256
"""Channels of keys, and of values, that kernels of the delta rule hold states of."""

KERNEL_CHUNK_SIZES = (16, 64)
"""Least and most tokens of a chunk of theirs: tensor cores take 16 rows, a program inverts four such tiles."""


def kernel_chunk_size(chunk_size: int) -> int:
    """The nearest kernels have; which, changes results by rounding alone."""
    least, most = KERNEL_CHUNK_SIZES
    return min(max(chunk_size, least), most)


def callback_threads(devices: int) -> int:
    """Threads JAX needs on a CPU where a program interprets kernels on several devices and exchanges data between them.

    An interpreted kernel holds a device's thread and waits for another that copies its arrays. With too few, all wait
    for ever. JAX has as many as the machine has cores, or as the environment variable NPROC says when it is first used.
    """
    return 4 * devices


def uses_kernels(impl: str, on_cuda: bool) -> bool:
    """Whether kernels compute.

    Raises:
        ValueError: no implementation has that name.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl: expected one of {IMPLEMENTATIONS}, got {impl!r}")
    return impl == "triton" or (impl == "auto" and on_cuda)
