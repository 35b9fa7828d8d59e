"""Messages between the layers of neighbouring ranks, as arguments and results of one program.

A layer receives the message of the previous rank and sends one to the next rank with relay(), wherever in a model it
is called. A loop around the model provides and collects the messages (context_parallel.wavefront). If JAX traces a
function separately, for example in jax.checkpoint, the function must return its messages; see carried_through().
"""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax.numpy as jnp
from jax import Array, lax


class Carry:
    """The messages of one call of a model.

    Args:
        received: messages of the previous rank, in the order of the layers; None: unknown, and zeros replace them.
        first: index of the message that the next layer receives.
        is_read: scalar that is False if the loop drops the result of the call; None: it is read.
    """

    def __init__(self, received: Sequence[Array] | None, first: int = 0, is_read: Array | None = None) -> None:
        self.received = received
        self.first = first
        self.is_read = is_read
        self.sent: list[Array] = []


_CARRY: ContextVar[Carry | None] = ContextVar("messages between ranks", default=None)


def relay(shape: tuple[int, ...], dtype: Any, compute: Callable[[Array], tuple[Array, Any]]) -> Any:
    """Receive the message of the previous rank and send the message that follows from it to the next rank.

    Args:
        shape: shape of both messages.
        dtype: dtype of both messages.
        compute: computes the message to send and a result from the received message.

    Returns:
        The result of ``compute``.

    Raises:
        ValueError: no loop collects the messages.
    """
    carry = _CARRY.get()
    if carry is None:
        raise ValueError(
            "cp_exchange: expected another than 'pipelined' outside of jax_impl.context_parallel.over_microbatches, "
            "whose microbatches follow one another over ranks; use 'all_gather'"
        )
    index = carry.first + len(carry.sent)
    sent, result = compute(jnp.zeros(shape, dtype) if carry.received is None else carry.received[index])
    assert (sent.shape, sent.dtype) == (shape, dtype), f"{index}: {sent.shape} {sent.dtype}, expected {shape} {dtype}"
    carry.sent.append(sent)
    return result


def with_carry(
    run: Callable[..., Any], received: Sequence[Array] | None, is_read: Array | None = None
) -> Callable[..., tuple[Any, tuple[Array, ...]]]:
    """Return a function that runs ``run`` and returns its result and the messages that its layers send.

    Args:
        run: the model.
        received: messages for its layers; see Carry.
        is_read: see Carry.
    """
    return _with(run, Carry(received, is_read=is_read))


def without_gradient_unless_read(x: Array) -> Array:
    """Return an array whose gradient is 0 in a call of the model whose result the loop drops.

    Such a call computes with arrays of no microbatch. All other gradients are 0 there, because that of its result is.
    """
    carry = _CARRY.get()
    if carry is None or carry.is_read is None:
        return x
    return jnp.where(carry.is_read, x, lax.stop_gradient(x))


def carried_through(
    run: Callable[..., Any], transform: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """Return ``transform(run)``, with the messages of its layers passed through its result.

    Args:
        run: function whose layers may call relay().
        transform: transformation that traces run separately, such as jax.checkpoint.
    """

    def collected(*args: Any) -> Any:
        carry = _CARRY.get()
        if carry is None:
            return transform(run)(*args)
        result, sent = transform(_with(run, _following(carry)))(*args)
        carry.sent.extend(sent)
        return result

    return collected


def _following(carry: Carry) -> Carry:
    """Return a carry with the messages of the next layers."""
    return Carry(carry.received, carry.first + len(carry.sent), carry.is_read)


def _with(run: Callable[..., Any], carry: Carry) -> Callable[..., tuple[Any, tuple[Array, ...]]]:
    """Return a function that runs ``run`` with the messages of ``carry`` and returns those that its layers send."""

    def run_and_collect(*args: Any) -> tuple[Any, tuple[Array, ...]]:
        own = _following(carry)  # a new one for each trace
        before = _CARRY.set(own)
        try:
            return run(*args), tuple(own.sent)
        finally:
            _CARRY.reset(before)

    return run_and_collect
