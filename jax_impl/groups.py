"""What processes that jax.distributed has joined tell each other beside their arrays."""

from collections.abc import Callable

import jax
import numpy as np

from plans.checkpoint import CheckpointError

LONGEST = 4096
"""Bytes of what is said; the rest is cut off."""


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
