"""What layers take from the rank before and hand on to the next, as arguments and results of one program.

A layer asks for what came and leaves what goes on, wherever in a model it is called. Around the model stands a loop
that gives and collects both (context_parallel.wavefront); a function that JAX traces by itself, such as one it computes
again, hands on through its own result, see collecting.
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax.numpy as jnp
from jax import Array


class Carry:
    """Of one call of a model: what came, and so far, what goes on.

    Args:
        came: in order of the layers that take it; None: it is not known, and zeros stand in.
        first: place in it of what is taken next.
    """

    def __init__(self, came: Sequence[Array] | None, first: int = 0) -> None:
        self.came, self.first = came, first
        self.sent: list[Array] = []


_CARRY: ContextVar[Carry | None] = ContextVar("what is handed on", default=None)


def hand_over(shape: tuple[int, ...], dtype: Any, own: Callable[[Array], tuple[Array, Any]]) -> Any:
    """Take what the rank before hands on, and hand on to the next what follows from it.

    Args:
        shape, dtype: of both.
        own: makes of what came what goes on, and a result.

    Returns:
        The result.

    Raises:
        ValueError: nobody collects what is handed on.
    """
    carry = _CARRY.get()
    if carry is None:
        raise ValueError(
            "cp_exchange: expected another than 'pipelined' outside of jax_impl.context_parallel.over_microbatches, "
            "whose microbatches follow one another over ranks"
        )
    place = carry.first + len(carry.sent)
    part, result = own(jnp.zeros(shape, dtype) if carry.came is None else carry.came[place])
    assert (part.shape, part.dtype) == (shape, dtype), f"{place}: {part.shape} {part.dtype}, expected {shape} {dtype}"
    carry.sent.append(part)
    return result


def handing(run: Callable[..., Any], came: Sequence[Array] | None) -> Callable[..., tuple[Any, tuple[Array, ...]]]:
    """``run``, with what came given to its layers; returns its result and what they hand on."""
    return _with(run, Carry(came))


def collecting(
    run: Callable[..., Any], apart: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """``apart(run)``, of a transformation that traces run by itself: what run hands on comes out through its result."""

    def collected(*args: Any) -> Any:
        carry = _CARRY.get()
        if carry is None:
            return apart(run)(*args)
        result, sent = apart(_with(run, Carry(carry.came, carry.first + len(carry.sent))))(*args)
        carry.sent.extend(sent)
        return result

    return collected


def _with(run: Callable[..., Any], carry: Carry) -> Callable[..., tuple[Any, tuple[Array, ...]]]:
    def given(*args: Any) -> tuple[Any, tuple[Array, ...]]:
        own = Carry(carry.came, carry.first)  # of this tracing
        before = _CARRY.set(own)
        try:
            return run(*args), tuple(own.sent)
        finally:
            _CARRY.reset(before)

    return given
