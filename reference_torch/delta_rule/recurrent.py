"""The delta rule token by token, as defined: the oracle of the other forms, and the form for incremental decoding."""

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
    cu_seqlens: Sequence[int] | None,
) -> tuple[Float[Tensor, "b t h v"], Float[Tensor, "n h k v"]]:
    """Return outputs and final states.

    Args:
        q: scaled queries. [B, T, H, K]
        k: keys. [B, T, H, K]
        v: values. [B, T, H, V]
        g: log decay, natural log, per channel or per head. [B, T, H, K or 1]
        beta: write strength. [B, T, H, 1]
        initial: states before the sequences; None: zeros. [N, H, K, V]
        cu_seqlens: offsets of packed sequences, and the end; None: each row of the batch is a sequence.

    Returns:
        Outputs [B, T, H, V] and final states [N, H, K, V].
    """
    ends = [(0, q.shape[1])] if cu_seqlens is None else list(itertools.pairwise(cu_seqlens))
    rows = len(q)  # states per entry of ends; a packed sequence has one
    outputs = []
    finals = []
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
    """Return the output of one token and the state after it; see recurrent for the arguments, here without axis T."""
    state = g.exp()[..., None] * state
    error = beta * (v - (k[..., None] * state).sum(-2))
    state = state + k[..., None] * error[..., None, :]
    return (q[..., None] * state).sum(-2), state
