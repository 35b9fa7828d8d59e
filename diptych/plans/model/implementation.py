"""Choice between the framework's operations and the shared Triton kernels, and the limits of the kernels."""

import importlib.util

IMPLEMENTATIONS = ("auto", "reference", "triton")
"""``auto`` is triton on a CUDA device and reference elsewhere; triton on a CPU is Triton's interpreter."""

MAX_KERNEL_STREAMS = 8
"""Maximum number of residual streams of the kernels."""

MAX_KERNEL_CHANNELS = 256
"""Maximum width of a key head, and of a value head, of the delta-rule kernels."""

KERNEL_CHUNK_SIZES = (16, 64)
"""Minimum and maximum tokens per chunk of the kernels: a tensor-core tile has 16 rows, a program inverts four tiles."""


def kernel_chunk_size(chunk_size: int) -> int:
    """Return the nearest chunk size that the kernels support; it changes results by rounding only."""
    least, most = KERNEL_CHUNK_SIZES
    return min(max(chunk_size, least), most)


def callback_threads(devices: int) -> int:
    """Return the threads that JAX needs to interpret kernels on several CPU devices that exchange data.

    An interpreted kernel occupies its device's thread while it waits for another thread to copy its arrays, so too few
    threads deadlock. JAX has one thread per core, or the value of the environment variable NPROC at its first use.
    """
    return 4 * devices


def uses_kernels(impl: str, on_cuda: bool) -> bool:
    """Return True if the kernels compute.

    Args:
        impl: one of IMPLEMENTATIONS.
        on_cuda: True if the arrays are on a CUDA device.

    Raises:
        ValueError: impl is unknown.
    """
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl: expected one of {IMPLEMENTATIONS}, got {impl!r}")
    return impl == "triton" or (impl == "auto" and on_cuda)


def require_packages(*names: str) -> None:
    """Check that the packages that run the kernels are installed.

    Raises:
        ModuleNotFoundError: a package is not installed.
    """
    for name in names:
        if not _is_installed(name):
            raise ModuleNotFoundError(
                f"impl: expected installed packages {' and '.join(names)}, which run the kernels on this device, but "
                f"{name!r} is missing; pip install 'diptych[all]', or choose impl='reference'",
                name=name,
            )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
