"""How wrong states become that ranks do not pass on whole: bounds from gates and keys, before anything is computed.

Over its tokens a rank turns a state S into M S + H, a token at a time: S -> (1 - c kk^T) D S + beta k v^T of unit keys,
with D = diag(e^g), c = beta |k|^2. Then

    |M|         is at most A, the product of e^(max g) max(1, |1 - c|)
    |S|^2       grows at most to (e^(max g) |S|)^2 + beta |v|^2 where c <= 1, since squares are convex; and |S| at most
                to e^(max g) max(1, |1 - c|) |S| + beta |k| |v|
    sigma(M - diag(d)), d the product of all D, are at most the roots of the eigenvalues of the sum over tokens of
                c / (2 - c) a^2 (d' k)(d' k)^T, where d' are the decays after the token and a the largest up to it: what
                x loses to the keys, the sum of c (2 - c) (k D x)^2, is at most |x|^2, and Cauchy-Schwarz does the rest

Two approximations are bounded by these, each of the state a rank begins with, in the Frobenius norm of a head:

    truncation  what lies further back than n ranks is left out: |S| there, through n maps
    low rank    M is sent as diag(d) + U V^T of rank n, d the product of its decays or 0, whichever is nearer

Arrays are numpy's or turned into such; sequences lie end to end, as diptych.plans.context.sequences takes them.
"""

from typing import Any, NamedTuple

import numpy as np

from diptych.plans.context.sequences import local_sequences


class RankBounds(NamedTuple):
    """What gates and keys say of every rank's state and map."""

    begun: np.ndarray
    """Of the state a rank begins with. [R, HV]"""
    transition: np.ndarray
    """Of the map M it passes on; 0 where it passes none. [R, HV]"""
    beside_diagonal: np.ndarray
    """Of the singular values of M - diag(d), largest first; 0 where M is. [R, HV, K]"""


class _Tokens(NamedTuple):
    """Those of one rank's last sequence. [t, HV] but for directions and g, [t, HV, K]."""

    correction: np.ndarray
    """c"""
    directions: np.ndarray
    """Unit keys."""
    added: np.ndarray
    """beta |v|^2"""
    pushed: np.ndarray
    """beta |k| |v|"""
    g: np.ndarray

    def grow(self, norm: np.ndarray) -> np.ndarray:
        """The bound of a state's norm after them. [HV]"""
        for c, added, pushed, g in zip(self.correction, self.added, self.pushed, self.g, strict=True):
            decay = np.exp(g.max(-1))
            far = decay * np.maximum(1.0, np.abs(1.0 - c)) * norm + pushed
            norm = np.where(c <= 1.0, np.minimum(far, np.sqrt((decay * norm) ** 2 + added)), far)
        return norm

    def transition(self) -> np.ndarray:
        """A. [HV]"""
        return np.exp(self.g.max(-1).sum(0)) * np.maximum(1.0, np.abs(1.0 - self.correction)).prod(0)

    def beside_diagonal(self) -> np.ndarray:
        """Bounds of singular values of M - diag(d). [HV, K]"""
        before = np.exp(2 * np.cumsum(self.g.max(-1), axis=0))
        after = np.exp(self.g.sum(0) - np.cumsum(self.g, axis=0)) * self.directions
        with np.errstate(divide="ignore", invalid="ignore"):
            share = np.where(self.correction < 2.0, self.correction / (2.0 - self.correction), np.inf)
        if not np.isfinite(share).all():
            return np.full(self.directions.shape[1:], np.inf)
        squares = np.linalg.eigvalsh(np.einsum("th,thk,thl->hkl", share * before, after, after))[:, ::-1]
        return np.sqrt(np.maximum(squares, 0.0))


def rank_bounds(k: Any, v: Any, g: Any, beta: Any, cu_seqlens: Any, size: int, initial_state: Any = None) -> RankBounds:
    """What gates and keys say of every rank's state and map.

    Args:
        k: keys as the rule uses them, normed if it norms them; HV / H neighbours share a head. [1, T, H, K]
        v: values. [1, T, HV, V]
        g: log decays after the gate. [1, T, HV, K], or of GDN [1, T, HV]
        beta: [1, T, HV]
        cu_seqlens: where sequences begin, and the end of all. [N + 1] int32
        size: number of ranks R.
        initial_state: None for zeros. [N, HV, K, V]
    """
    k, v, g, beta, offsets = (np.asarray(x) for x in (k, v, g, beta, cu_seqlens))
    heads, key, part = v.shape[2], k.shape[-1], v.shape[1] // size
    k = np.repeat(k[0], heads // k.shape[2], axis=1)
    g = g[0] if g.ndim == 4 else np.broadcast_to(g[0, ..., None], k.shape)
    lengths, values = np.linalg.norm(k, axis=-1), np.linalg.norm(v[0], axis=-1)
    unit = k / np.where(lengths > 0, lengths, 1.0)[..., None]
    tokens = _Tokens(beta[0] * lengths**2, unit, beta[0] * values**2, beta[0] * lengths * values, g)
    begun, transition = np.zeros((size, heads)), np.zeros((size, heads))
    beside = np.zeros((size, heads, key))
    for rank in range(size - 1):
        local = local_sequences(offsets, rank, part)
        last = int(local.num_sequences) - 1
        begin, end = (rank * part + int(x) for x in local.cu_seqlens[last : last + 2])
        if int(local.post_num_ranks) == 0:
            continue
        own = _Tokens(*(x[begin:end] for x in tokens))
        norm = np.zeros(heads)
        if last == 0 and int(local.pre_num_ranks) > 0:
            norm, transition[rank], beside[rank] = begun[rank], own.transition(), own.beside_diagonal()
        elif initial_state is not None:
            norm = np.linalg.norm(np.asarray(initial_state)[int(local.first_sequence) + last], axis=(-2, -1))
        begun[rank + 1] = own.grow(norm)
    return RankBounds(begun, transition, beside)


def truncation_bounds(bounds: RankBounds, truncate_ranks: int) -> np.ndarray:
    """Of the state every rank begins with, where states reach so many ranks ahead at most. [R, HV]"""
    error = np.zeros_like(bounds.begun)
    for rank in range(truncate_ranks + 1, len(error)):
        first = rank - truncate_ranks
        error[rank] = bounds.begun[first] * bounds.transition[first:rank].prod(0)
    return error


def low_rank_errors(bounds: RankBounds, transition_rank: int) -> np.ndarray:
    """Of the map that every rank sends, in the spectral norm. [R, HV]"""
    if transition_rank >= bounds.beside_diagonal.shape[-1]:
        return np.zeros_like(bounds.transition)
    return np.minimum(bounds.transition, bounds.beside_diagonal[..., transition_rank])


def low_rank_bounds(bounds: RankBounds, transition_rank: int) -> np.ndarray:
    """Of the state every rank begins with, where maps are sent with so low a rank. [R, HV]"""
    error, wrong = np.zeros_like(bounds.begun), low_rank_errors(bounds, transition_rank)
    for rank in range(1, len(error)):
        sent = bounds.transition[rank - 1] + wrong[rank - 1]
        error[rank] = sent * error[rank - 1] + wrong[rank - 1] * bounds.begun[rank - 1]
    return error
