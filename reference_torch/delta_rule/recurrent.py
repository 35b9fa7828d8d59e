"""The delta rule as it is defined, a token at a time: the oracle of all other forms, and how a token is decoded."""

import itertools
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor


def recurrent(
    q: Float[Tensor, "b t h k"],
    k: Float[Tensor, "b t h k"],
    v: Float[Tensor, "b t h v"],
    g: Float[Tensor, "b t h g"],
    beta: Float[Tensor, "b t h 1"],
    initial: Float[Tensor, "n h k v"] | None,
    offsets: Sequence[int] | None,
) -> tuple[Float[Tensor, "b t h v"], Float[Tensor, "n h k v"]]:
    """Outputs and final states.

    Args:
        q: scaled queries.
        k: keys.
        v: values.
        g: log decay by channel, or one for all.
        beta: how much of an error is corrected.
        initial: states before the sequences; None for zeros.
        offsets: where packed sequences begin, and at last the end; None where every sequence is a row of the batch.
    """
    ends = [(0, q.shape[1])] if offsets is None else list(itertools.pairwise(offsets))
    rows = len(q)  # of states a stretch of tokens has; packed sequences have one each
    outputs, finals = [], []
    for number, (start, stop) in enumerate(ends):
        state = q.new_zeros(rows, *k.shape[2:], v.shape[-1])
        if initial is not None:
            state = initial[number * rows : (number + 1) * rows]
        tokens = (x[:, start:stop].unbind(1) for x in (q, k, v, g, beta))
        for q_t, k_t, v_t, g_t, beta_t in zip(*tokens, strict=True):
            output, state = step(q_t, k_t, v_t, g_t, beta_t, state)
            outputs.append(output)
        finals.append(state)
    return torch.stack(outputs, 1), torch.cat(finals)


def step(
    q: Float[Tensor, "b h k"],
    k: Float[Tensor, "b h k"],
    v: Float[Tensor, "b h v"],
    g: Float[Tensor, "b h g"],
    beta: Float[Tensor, "b h 1"],
    state: Float[Tensor, "b h k v"],
) -> tuple[Float[Tensor, "b h v"], Float[Tensor, "b h k v"]]:
    """One token: its output and the state after it."""
    state = g.exp()[..., None] * state
    error = beta * (v - (k[..., None] * state).sum(-2))
    state = state + k[..., None] * error[..., None, :]
    return (q[..., None] * state).sum(-2), state
