"""Error bounds of the approximate state exchange, computed from gates and keys.

A rank maps its initial state S to M S + S_local. Each token applies S -> (1 - c kk^T) D S + beta k v^T with a unit key
k, D = diag(e^g) and c = beta |k|^2 for the key before normalization. The bounds are:

    |M|         is at most A, the product of e^(max g) max(1, |1 - c|)
    |S|         grows at most to e^(max g) max(1, |1 - c|) |S| + beta |k| |v|; if c <= 1, convexity of squares also
                bounds |S|^2 by (e^(max g) |S|)^2 + beta |v|^2
    sigma(M - diag(d)), with d the product of all D, are at most the square roots of the eigenvalues of the sum over
                tokens of c / (2 - c) a^2 (d' k)(d' k)^T, where d' is the product of the decays after the token and a
                the largest product of decays up to it. This follows with Cauchy-Schwarz from the loss of a vector x to
                the keys: the sum of c (2 - c) (k D x)^2 is at most |x|^2.

They bound the error of a rank's initial state, in the Frobenius norm of a head, for two approximations:

    truncation  states from more than n ranks back are omitted: the error is |S| there times the norms of n maps
    low rank    M is sent as diag(d) + U V^T of rank n, with d the product of the decays or 0, whichever is closer

Inputs are converted to numpy arrays; sequences follow each other without gaps, as in diptych.plans.context.sequences.
"""

from typing import Any, NamedTuple

import numpy as np

from diptych.plans.context.sequences import local_sequences


class RankBounds(NamedTuple):
    """Upper bounds on the state and the transition of every rank."""

    initial: np.ndarray
    """Bound on the norm of a rank's initial state. [R, HV]"""
    transition: np.ndarray
    """Bound on the norm of the transition M that a rank sends; 0 if it sends none. [R, HV]"""
    beside_diagonal: np.ndarray
    """Bounds on the singular values of M - diag(d), in descending order; 0 if M is 0. [R, HV, K]"""


class _Tokens(NamedTuple):
    """Per-token quantities of one rank's last sequence; [t, HV], and [t, HV, K] for directions and g."""

    correction: np.ndarray
    """Correction c = beta |k|^2."""
    directions: np.ndarray
    """Unit keys."""
    added: np.ndarray
    """Added squared norm beta |v|^2."""
    pushed: np.ndarray
    """Added norm beta |k| |v|."""
    g: np.ndarray
    """Log decays."""

    def grow(self, norm: np.ndarray) -> np.ndarray:
        """Return the bound on the state's norm after the tokens, [HV], from the bound before them."""
        for c, added, pushed, g in zip(self.correction, self.added, self.pushed, self.g, strict=True):
            decay = np.exp(g.max(-1))
            far = decay * np.maximum(1.0, np.abs(1.0 - c)) * norm + pushed
            norm = np.where(c <= 1.0, np.minimum(far, np.sqrt((decay * norm) ** 2 + added)), far)
        return norm

    def transition(self) -> np.ndarray:
        """Return the bound A on the transition's norm, [HV]."""
        return np.exp(self.g.max(-1).sum(0)) * np.maximum(1.0, np.abs(1.0 - self.correction)).prod(0)

    def beside_diagonal(self) -> np.ndarray:
        """Return bounds on the singular values of M - diag(d), [HV, K]."""
        before = np.exp(2 * np.cumsum(self.g.max(-1), axis=0))
        after = np.exp(self.g.sum(0) - np.cumsum(self.g, axis=0)) * self.directions
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(self.correction < 2.0, self.correction / (2.0 - self.correction), np.inf)
        if not np.isfinite(share).all():
            return np.full(self.directions.shape[1:], np.inf)
        squares = np.linalg.eigvalsh(np.einsum("th,thk,thl->hkl", share * before, after, after))[:, ::-1]
        return np.sqrt(np.maximum(squares, 0.0))


def rank_bounds(k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any, size: int, initial_state: Any = None) -> RankBounds:
    """Return upper bounds on the state and the transition of every rank.

    Args:
        k: keys, normalized if the rule normalizes them; HV / H consecutive value heads share a key head. [1, T, H, K]
        v: values. [1, T, HV, V]
        g: log decays after the gate, natural log, <= 0. [1, T, HV, K], for GDN [1, T, HV]
        beta: write strengths. [1, T, HV]
        cu_seqlens: start offsets of the sequences, and the total length. [N + 1] int32
        size: number of context-parallel ranks R.
        initial_state: initial states; None: zeros. [N, HV, K, V]
    """
    k, v, g, beta, cu_seqlens = (np.asarray(x) for x in (k, v, g, beta, cu_seqlens))
    heads = v.shape[2]
    part = v.shape[1] // size
    k = np.repeat(k[0], heads // k.shape[2], axis=1)
    g = g[0] if g.ndim == 4 else np.broadcast_to(g[0, ..., None], k.shape)
    lengths = np.linalg.norm(k, axis=-1)
    values = np.linalg.norm(v[0], axis=-1)
    unit = k / np.where(lengths > 0, lengths, 1.0)[..., None]
    tokens = _Tokens(beta[0] * lengths**2, unit, beta[0] * values**2, beta[0] * lengths * values, g)
    initial = np.zeros((size, heads))
    transition = np.zeros((size, heads))
    beside = np.zeros((size, heads, k.shape[-1]))
    for rank in range(size - 1):
        local = local_sequences(cu_seqlens, rank, part)
        last = int(local.num_sequences) - 1
        begin, end = (rank * part + int(x) for x in local.cu_seqlens[last : last + 2])
        if int(local.post_num_ranks) == 0:
            continue
        own = _Tokens(*(x[begin:end] for x in tokens))
        norm = np.zeros(heads)
        if last == 0 and int(local.pre_num_ranks) > 0:
            norm = initial[rank]
            transition[rank] = own.transition()
            beside[rank] = own.beside_diagonal()
        elif initial_state is not None:
            norm = np.linalg.norm(np.asarray(initial_state)[int(local.first_sequence) + last], axis=(-2, -1))
        initial[rank + 1] = own.grow(norm)
    return RankBounds(initial, transition, beside)


def truncation_bounds(bounds: RankBounds, truncate_ranks: int) -> np.ndarray:
    """Return bounds on the error of every rank's initial state with truncation, [R, HV].

    Args:
        bounds: result of rank_bounds.
        truncate_ranks: number of following ranks that a state reaches.
    """
    error = np.zeros_like(bounds.initial)
    for rank in range(truncate_ranks + 1, len(error)):
        first = rank - truncate_ranks
        error[rank] = bounds.initial[first] * bounds.transition[first:rank].prod(0)
    return error


def low_rank_errors(bounds: RankBounds, transition_rank: int) -> np.ndarray:
    """Return bounds on the error of every rank's transition with low rank, in the spectral norm, [R, HV]."""
    if transition_rank >= bounds.beside_diagonal.shape[-1]:
        return np.zeros_like(bounds.transition)
    return np.minimum(bounds.transition, bounds.beside_diagonal[..., transition_rank])


def low_rank_bounds(bounds: RankBounds, transition_rank: int) -> np.ndarray:
    """Return bounds on the error of every rank's initial state with low-rank transitions, [R, HV].

    Args:
        bounds: result of rank_bounds.
        transition_rank: rank of the low-rank part of a sent transition.
    """
    error = np.zeros_like(bounds.initial)
    transition_error = low_rank_errors(bounds, transition_rank)
    for rank in range(1, len(error)):
        sent = bounds.transition[rank - 1] + transition_error[rank - 1]
        error[rank] = sent * error[rank - 1] + transition_error[rank - 1] * bounds.initial[rank - 1]
    return error
