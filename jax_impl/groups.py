"""The mesh of all devices, and what processes that jax.distributed has joined tell each other beside their arrays."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from diptych.plans.checkpoint import CheckpointError
from diptych.plans.config import TransformerConfig
from diptych.plans.mesh import MESH_AXES, mesh_shape, model_parallel_words

LONGEST = 4096
"""Bytes of what is said; the rest is cut off."""


def make_mesh(config: TransformerConfig, devices: Sequence[Any] | None = None) -> Mesh | None:
    """Devices as a mesh of replicas, context and pipeline ranks; None: there is one.

    In the order of diptych.plans.mesh.MESH_AXES; axis "pp" is always there, "cp" and "dp" where they
    are longer than 1.

    Args:
        config: the model's.
        devices: of all processes; None: all there are.

    Raises:
        ValueError: their number is no multiple of what one replica takes.
    """
    devices = jax.devices() if devices is None else devices
    n = config.model_parallel_size
    if len(devices) % n:
        raise ValueError(
            f"{model_parallel_words(config)}: expected a divisor of the {len(devices)} devices given, got {n}; give a "
            f"multiple of {n}"
        )
    if len(devices) == 1:
        return None
    sizes = dict(zip(MESH_AXES, mesh_shape(config, len(devices)), strict=True))
    axes = {name: size for name, size in sizes.items() if size > 1 or name == "pp"}
    return Mesh(np.array(devices).reshape([*axes.values()]), tuple(axes))


def said_on_all_ranks(text: str) -> list[str]:
    """What every process says, in order of their ranks, on every process."""
    if jax.process_count() == 1:
        return [text]
    from jax.experimental.multihost_utils import process_allgather

    line = np.frombuffer(text.encode()[:LONGEST].ljust(LONGEST, b"\0"), np.uint8)
    return [said.tobytes().rstrip(b"\0").decode(errors="replace") for said in process_allgather(line)]


def on_first_rank(write: Callable[[], str]) -> str:
    """Call a function on the first process alone; every process gets what it returned, or raises what it raised.

    Raises:
        CheckpointError: with several processes, whatever the function raised, in its words.
    """
    if jax.process_count() == 1:
        return write()
    written = failure = ""
    if jax.process_index() == 0:
        try:
            written = write()
        except Exception as error:  # whatever it is: the other processes must not wait for a call that failed
            failure = str(error) or repr(error)
    written, failure = (said_on_all_ranks(text)[0] for text in (written, failure))
    if failure:
        raise CheckpointError(failure)
    return written
