"""What approximate exchanges must give: one process that calls the rule part by part, and hands states on by itself."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from diptych.plans.context.sequences import local_sequences
from reference_torch.delta_rule.gates import kda_gate
from tests.context.jobs import (
    KEY,
    TOKENS,
    VALUE_HEADS,
    Case,
    arrays_of,
    cotangents_of,
    gradients_of,
    leaves_of,
    run_rule,
)

APPROXIMATIONS = {
    "the nearest rank": {"exchange": "ring", "truncate": 1},
    "the nearest two": {"exchange": "ring", "truncate": 2},
    "more than there are": {"exchange": "ring", "truncate": 7},
    "rank 1": {"exchange": "all_gather", "rank": 1},
    "rank 3": {"exchange": "all_gather", "rank": 3},
    "rank 8": {"exchange": "all_gather", "rank": 8},
}


class Part(NamedTuple):
    """One rank's tokens."""

    arrays: dict[str, torch.Tensor]
    offsets: torch.Tensor
    sequences: slice
    came: bool
    goes_on: bool
    transition: torch.Tensor
    """M. [HV, K, K]"""
    state: torch.Tensor
    """H. [HV, K, V]"""


def approximated(case: Case, size: int) -> tuple[np.ndarray, np.ndarray | None, dict[str, np.ndarray]]:
    """Outputs, final states and gradients; autograd goes through M, but for what is rounded off it."""
    leaves = leaves_of(case, arrays_of(case))
    parts = [*_parts(case, leaves, size)]
    o, finals = _outputs(case, parts, states_begun_with(case, parts), leaves)
    return gradients_of(case, leaves, o, finals, *cotangents_of(case))


def states_begun_with(case: Case, parts: list[Part]) -> list[torch.Tensor]:
    """Of every rank's first sequence, folded one after the other. [HV, K, V] each"""
    found = []
    for rank, part in enumerate(parts):
        begun = torch.zeros_like(part.state)
        for before in parts[0 if case.truncate is None else max(0, rank - case.truncate) : rank]:
            sent = before.transition if case.rank is None else rounded(case, before)
            begun = sent @ begun + before.state
        found.append(begun)
    return found


def rounded(case: Case, part: Part) -> torch.Tensor:
    """The nearest to M of the rank asked for, with gradients as if it were M."""
    g = part.arrays["g"]
    if case.rule == "gate":
        g = kda_gate(g, part.arrays["A_log"], part.arrays["dt_bias"])
    decay = np.exp(g.detach().numpy()[0].sum(0))
    nearest = []
    for head, transition in enumerate(part.transition.detach().numpy()):
        candidates = []
        for diagonal in (np.zeros((KEY, KEY)), np.diag(np.broadcast_to(decay[head], KEY))):
            left, values, right = np.linalg.svd(transition - diagonal)
            values[case.rank :] = 0.0
            candidates.append(diagonal + (left * values) @ right)
        nearest.append(min(candidates, key=lambda x: np.linalg.norm(transition - x, 2)))
    return part.transition + (torch.from_numpy(np.stack(nearest)) - part.transition).detach()


def _parts(case: Case, leaves: dict[str, torch.Tensor], size: int) -> Iterator[Part]:
    length = TOKENS // size
    for rank in range(size):
        local = local_sequences(np.array(case.offsets), rank, length)
        count, first = int(local.num_sequences), int(local.first_sequence)
        arrays = {
            name: x if name in ("A_log", "dt_bias") else x[:, rank * length : (rank + 1) * length]
            for name, x in leaves.items()
            if name != "initial_state"
        }
        came, goes_on = int(local.pre_num_ranks) > 0, int(local.post_num_ranks) > 0
        last = slice(int(local.cu_seqlens[count - 1]), length)
        tokens = {name: x if name in ("A_log", "dt_bias") else x[:, last] for name, x in arrays.items()}
        zero = torch.zeros(VALUE_HEADS, KEY, leaves["v"].shape[-1], dtype=torch.float64)
        transition = torch.zeros(VALUE_HEADS, KEY, KEY, dtype=torch.float64)
        state = zero
        is_first = came and count == 1
        if goes_on and is_first:
            nothing = torch.zeros(*tokens["v"].shape[:-1], KEY, dtype=torch.float64)
            transition = _final(case, tokens | {"v": nothing}, _eye())
        if goes_on:
            begins = zero if is_first or not case.states else leaves["initial_state"][first + count - 1]
            state = _final(case, tokens, begins)
        sequences = slice(first, first + count)
        yield Part(arrays, torch.from_numpy(local.cu_seqlens[: count + 1]), sequences, came, goes_on, transition, state)


def _eye() -> torch.Tensor:
    return torch.eye(KEY, dtype=torch.float64).expand(VALUE_HEADS, -1, -1)


def _final(case: Case, arrays: dict[str, Any], begun: torch.Tensor) -> torch.Tensor:
    """The state after some tokens of one sequence."""
    finals = run_rule(case._replace(states=True), arrays | {"initial_state": begun[None]})[1]
    return finals[0]


def _outputs(
    case: Case, parts: list[Part], begun: list[torch.Tensor], leaves: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Of all parts, side by side; final states by sequence."""
    outputs = []
    finals = torch.zeros(len(case.offsets) - 1, *parts[0].state.shape, dtype=torch.float64)
    for part, state in zip(parts, begun, strict=True):
        own = torch.zeros(len(part.offsets) - 1, *state.shape, dtype=torch.float64)
        if case.states:
            own = leaves["initial_state"][part.sequences]
        if part.came:
            own = torch.cat([state[None], own[1:]])
        o, after = run_rule(
            case._replace(states=True), part.arrays | {"initial_state": own}, cu_seqlens=part.offsets.int()
        )
        outputs.append(o)
        ended = slice(part.sequences.start, part.sequences.stop - part.goes_on)
        finals = torch.cat([finals[: ended.start], after[: ended.stop - ended.start], finals[ended.stop :]])
    return torch.cat(outputs, dim=1), finals if case.states else None
