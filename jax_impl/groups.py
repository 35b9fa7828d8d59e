"""The mesh of all devices, and communication of text between the processes of jax.distributed."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from diptych.plans.checkpoint import CheckpointError
from diptych.plans.config import TransformerConfig
from diptych.plans.mesh import MESH_AXES, mesh_shape, replica_settings

MAX_TEXT_BYTES = 4096
"""The maximal number of bytes of a text; the rest is cut off."""


def make_mesh(config: TransformerConfig, devices: Sequence[Any] | None = None) -> Mesh | None:
    """Return the mesh of data-, context-, pipeline- and tensor-parallel ranks, or None for one device.

    The axes are in the order of diptych.plans.mesh.MESH_AXES. The mesh always has an axis "pp"; it has the others only
    if their size is larger than 1.

    Args:
        config: configuration of the model.
        devices: devices of all processes; None: all available devices.

    Raises:
        ValueError: the number of devices is not a multiple of the size of one replica.
    """
    devices = jax.devices() if devices is None else devices
    n = config.model_parallel_size
    if len(devices) % n:
        raise ValueError(
            f"{replica_settings(config)}: expected a divisor of the number of devices, {len(devices)}, got {n}; "
            f"pass a multiple of {n}"
        )
    if len(devices) == 1:
        return None
    sizes = dict(zip(MESH_AXES, mesh_shape(config, len(devices)), strict=True))
    axes = {name: size for name, size in sizes.items() if size > 1 or name == "pp"}
    return Mesh(np.array(devices).reshape([*axes.values()]), tuple(axes))


def gather_texts(text: str) -> list[str]:
    """Return the texts of all processes, in order of their ranks, on every process.

    Args:
        text: text of this process; with several processes it is cut after MAX_TEXT_BYTES bytes.
    """
    if jax.process_count() == 1:
        return [text]
    from jax.experimental.multihost_utils import process_allgather

    line = np.frombuffer(text.encode()[:MAX_TEXT_BYTES].ljust(MAX_TEXT_BYTES, b"\0"), np.uint8)
    return [text_bytes.tobytes().rstrip(b"\0").decode(errors="replace") for text_bytes in process_allgather(line)]


def on_first_rank(write: Callable[[], str]) -> str:
    """Call a function on the first process only, and return its result or raise its error on every process.

    Args:
        write: the function.

    Raises:
        CheckpointError: with several processes, the function raised an error; the message is that of the error, cut
            after MAX_TEXT_BYTES bytes.
    """
    if jax.process_count() == 1:
        return write()
    written = ""
    failure = ""
    cause: Exception | None = None
    if jax.process_index() == 0:
        try:
            written = write()
        except Exception as error:  # any error: the other processes must not wait for a failed call
            cause = error
            failure = str(error) or repr(error)
    written, failure = (gather_texts(text)[0] for text in (written, failure))
    if failure:
        raise CheckpointError(failure) from cause
    return written
