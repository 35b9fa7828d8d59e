"""Experiments that the notebooks run: one module per notebook, and the settings that all share.

A function here trains, measures or counts, and returns numbers. The notebook draws them with parity.figures and
explains them.
"""

import os
import sys
from collections.abc import Sequence

from parity.figures import use_style

_QUICK = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
"""Flags with which XLA compiles the programs of the notebooks in half the time."""


def start(devices: int = 1, quick_compile: bool = True) -> None:
    """Set JAX, PyTorch and the figure style for a notebook on a CPU, and print the versions.

    Call it first: JAX reads the number of devices once.

    Args:
        devices: number of CPU devices of JAX.
        quick_compile: switch off most of XLA's optimizations. Compiling then takes a third of the time.
    """
    os.environ["KINETO_LOG_LEVEL"] = "6"  # PyTorch's profiler prints otherwise
    import jax
    import torch

    if quick_compile and jax.__version__.startswith("0.10."):  # XLA ends a process for a flag that it does not know
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_QUICK}"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_disable_most_optimizations", quick_compile)
    torch.set_num_threads(1)
    use_style()
    print(f"python {sys.version.split()[0]}, torch {torch.__version__}, jax {jax.__version__}, on a CPU")


def assert_bounds(headline: Sequence[tuple[str, float, float, float]]) -> None:
    """Print the main numbers of a notebook and assert that each is within its bounds.

    Args:
        headline: name, value, least and most of each number.
    """
    for name, value, least, most in headline:
        print(f"{value:9.3g}  {name}")
        assert least <= value <= most, f"{name}: expected {least:.3g} to {most:.3g}, got {value:.3g}"
