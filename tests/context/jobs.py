"""What ranks run in tests of context parallelism, and what all of them together must give."""

import time
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from diptych.plans.context.sequences import local_sequences
from diptych.plans.schedule.messages import PipelineError
from diptych_kernels import api as functions
from reference_torch.context_parallel import build_cp_context, cp_short_convolution, exchange_states
from reference_torch.context_parallel.states import run_pipelined
from reference_torch.delta_rule import chunk_gated_delta_rule, chunk_kda, chunked

NAMES = ("q", "k", "v", "g", "beta", "A_log", "dt_bias", "initial_state")
TOKENS, HEADS, VALUE_HEADS, KEY, VALUE = 48, 2, 4, 5, 3

OFFSETS = {
    "one over all ranks": [0, 48],
    "long, empty and of lengths 1 and 2": [0, 1, 3, 40, 40, 48],
    "at the ends of parts": [0, 6, 12, 24, 24, 48],
    "many in one part": [0, 1, 2, 4, 5, 7, 8, 10, 11, 48],
    "one begins with the last token": [0, 0, 47, 48],
    "all short": [*range(0, 48, 2), 48],
}
"""Where sequences begin."""


class Case(NamedTuple):
    """One call of the rule."""

    rule: str
    """kda, gate (kda with its gate inside) or gdn."""
    offsets: tuple[int, ...]
    exchange: str
    disable_recompute: bool = False
    states: bool = True
    """Initial states are given, and final ones asked for."""
    wire: str | None = None
    impl: str = "reference"
    truncate: int | None = None
    """cp_truncate_ranks."""
    rank: int | None = None
    """cp_transition_rank."""
    alone: str | None = None
    """finals: the loss is of final states; initial_state: nothing else has a gradient."""


def arrays_of(case: Case) -> dict[str, np.ndarray]:
    """Of all sequences; every head decays at a rate of its own."""
    rng = np.random.default_rng(0)
    decay = (1, TOKENS, VALUE_HEADS) + (() if case.rule == "gdn" else (KEY,))
    rate = np.geomspace(0.05, 3.0, VALUE_HEADS)
    found = {
        "q": rng.standard_normal((1, TOKENS, HEADS, KEY)),
        "k": rng.standard_normal((1, TOKENS, HEADS, KEY)),
        "v": rng.standard_normal((1, TOKENS, VALUE_HEADS, VALUE)),
        "g": -rng.uniform(size=decay) * rate.reshape(-1, *[1] * (len(decay) - 3)),
        "beta": rng.uniform(size=(1, TOKENS, VALUE_HEADS)) * 1.5,
    }
    if case.rule == "gate":
        found |= {"A_log": rng.standard_normal(VALUE_HEADS), "dt_bias": rng.standard_normal(VALUE_HEADS * KEY)}
    if case.states:
        found["initial_state"] = rng.standard_normal((len(case.offsets) - 1, VALUE_HEADS, KEY, VALUE))
    return found


def cotangents_of(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Of outputs and final states."""
    rng = np.random.default_rng(1)
    states = (len(case.offsets) - 1, VALUE_HEADS, KEY, VALUE)
    return rng.standard_normal((1, TOKENS, VALUE_HEADS, VALUE)), rng.standard_normal(states) * case.states


def run_rule(case: Case, arrays: dict[str, Any], rules: tuple = (chunk_kda, chunk_gated_delta_rule), **options: Any):
    """Outputs and final states, in chunks small enough for several in a part."""
    options |= {name: arrays[name] for name in NAMES[5:] if name in arrays}
    if case.rule == "gate":
        options["use_gate_in_kernel"] = True
    rule = rules[case.rule == "gdn"]
    options |= {"disable_recompute": case.disable_recompute, "output_final_state": case.states, "impl": case.impl}
    return rule(*(arrays[name] for name in NAMES[:5]), chunk_size=4, use_qk_l2norm_in_kernel=True, **options)


def unsharded(case: Case) -> tuple[np.ndarray, np.ndarray | None, dict[str, np.ndarray]]:
    """Outputs, final states and gradients of one process."""
    arrays = leaves_of(case, arrays_of(case))
    o, finals = run_rule(case, arrays, cu_seqlens=torch.tensor(case.offsets, dtype=torch.int32))
    return gradients_of(case, arrays, o, finals, *cotangents_of(case))


def leaves_of(case: Case, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """As tensors, which have gradients unless another alone has."""
    wanted = {case.alone} if case.alone in arrays else {*arrays}
    return {name: torch.from_numpy(x.copy()).requires_grad_(name in wanted) for name, x in arrays.items()}


def gradients_of(
    case: Case,
    arrays: dict[str, torch.Tensor],
    o: torch.Tensor,
    finals: torch.Tensor | None,
    d_o: np.ndarray,
    d_finals: np.ndarray,
) -> tuple[np.ndarray, np.ndarray | None, dict[str, np.ndarray]]:
    """Outputs, final states and gradients, 0 of what the loss does not depend on."""
    loss = 0 if case.alone == "finals" else (o * torch.from_numpy(d_o)).sum()
    if finals is not None:
        loss = loss + (finals * torch.from_numpy(d_finals)).sum()
    loss.backward()
    leaves = {name: x for name, x in arrays.items() if x.requires_grad}
    gradients = {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in leaves.items()}
    found = {name: gradient.numpy() for name, gradient in gradients.items()}
    return o.detach().numpy(), None if finals is None else finals.detach().numpy(), found


def run_part(case: Case) -> tuple[np.ndarray, np.ndarray | None, dict[str, np.ndarray]]:
    """The same of this rank's part; states of its own sequences."""
    return part_of(case, arrays_of(case), cotangents_of(case))


class Poison(NamedTuple):
    """A number that is not finite, in one token."""

    name: str
    """Of the argument; or cotangent, of the outputs."""
    token: int
    value: float


def poisoned(case: Case, poison: Poison) -> tuple[dict[str, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Arguments and cotangents with a number that is not finite."""
    arrays, cotangents = arrays_of(case), cotangents_of(case)
    (cotangents[0] if poison.name == "cotangent" else arrays[poison.name])[0, poison.token, ..., -1] = poison.value
    return arrays, cotangents


def poisoned_parts(calls: list[tuple[Case, Poison]]) -> list[Any]:
    """This rank's part of each call."""
    return [part_of(case, *poisoned(case, poison)) for case, poison in calls]


def part_of(
    case: Case, whole: dict[str, np.ndarray], cotangents: tuple[np.ndarray, np.ndarray]
) -> tuple[np.ndarray, np.ndarray | None, dict[str, np.ndarray]]:
    """Outputs, final states and gradients of this rank's part of arrays."""
    group = dist.group.WORLD if dist.is_initialized() else None
    offsets = torch.tensor(case.offsets, dtype=torch.int32)
    context = build_cp_context(offsets, group, **exchange_of(case))
    d_o, d_finals = cotangents
    part, own = own_slices(case, context.rank, context.size)
    cut = {name: x if name in ("A_log", "dt_bias") else x[:, part] for name, x in whole.items()}
    if case.states:
        cut["initial_state"] = whole["initial_state"][own]
    arrays = leaves_of(case, cut)
    o, finals = run_rule(case, arrays, cu_seqlens=context.cu_seqlens, cp_context=context)
    return gradients_of(case, arrays, o, finals, d_o[:, part], d_finals[own])


def exchange_of(case: Case) -> dict[str, Any]:
    """How states travel, for build_cp_context."""
    return {
        "cp_exchange": case.exchange,
        "cp_wire_dtype": case.wire,
        "cp_truncate_ranks": case.truncate,
        "cp_transition_rank": case.rank,
    }


def run_kernels(case: Case, parts: int) -> Any:
    """run_part, where kernels scan so many parts of a sequence side by side."""
    usual, functions.parts_of = functions.parts_of, lambda *sizes: parts
    try:
        return run_part(case)
    finally:
        functions.parts_of = usual


def late_part(timeout: float, late: float, exchange: str = "all_gather") -> tuple[str, float] | None:
    """Rank 0 comes so many seconds late to an exchange; what the others say, and when."""
    offsets = torch.tensor([0, TOKENS], dtype=torch.int32)
    context = build_cp_context(offsets, dist.group.WORLD, cp_exchange=exchange)
    context = replace(context, timeout=timeout).of_layer(5)
    if context.rank == 0:
        time.sleep(late)
        return None
    start = time.perf_counter()
    try:
        if exchange == "pipelined":
            run_pipelined(None, torch.zeros(1, 2, 3), context, lambda states: (states, states))
        else:
            exchange_states(torch.zeros(1, 2, 2), torch.zeros(1, 2, 3), context)
    except PipelineError as error:
        return str(error), time.perf_counter() - start
    return None


def reused_context(passes: int, recomputed: bool) -> tuple[list[np.ndarray], str]:
    """Gradients of some texts, one after the other, whose convolutions share a context; recomputed: all forwards come
    first, and backward computes them again. And the error, where there is one.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    context = build_cp_context(
        torch.tensor([0, 4 * size], dtype=torch.int32), dist.group.WORLD, cp_exchange="pipelined"
    )
    weight = torch.arange(1.0, 4.0).repeat(2, 1).requires_grad_()

    def text(number: int) -> torch.Tensor:
        return torch.arange(8.0 * size).view(1, -1, 2)[:, 4 * rank : 4 * rank + 4] + number

    def run(x: torch.Tensor) -> torch.Tensor:
        layer = context.of_layer(0)
        if recomputed:
            return checkpoint(lambda x: cp_short_convolution(x, weight, layer), x, use_reentrant=False)
        return cp_short_convolution(x, weight, layer)

    found = []
    try:
        outputs = [run(text(number)) for number in range(passes)] if recomputed else None
        for number in range(passes):
            output = run(text(number)) if outputs is None else outputs[number]
            found.append(torch.autograd.grad(output.square().sum(), weight)[0].numpy())
    except ValueError as error:
        return found, str(error)
    return found, ""


def own_slices(case: Case, rank: int, size: int) -> tuple[slice, slice]:
    """Of all tokens and of all sequences, those of one rank."""
    local = local_sequences(np.array(case.offsets), rank, TOKENS // size)
    first = int(local.first_sequence)
    part = slice(rank * TOKENS // size, (rank + 1) * TOKENS // size)
    return part, slice(first, first + int(local.num_sequences))


def held(case: Case, size: int) -> np.ndarray:
    """Whether a sequence is on some rank; empty ones may not be. [N]"""
    found = np.zeros(len(case.offsets) - 1, bool)
    for rank in range(size):
        found[own_slices(case, rank, size)[1]] = True
    assert not np.diff(case.offsets)[~found].any()
    return found


def run_parts(cases: list[Case]) -> list[Any]:
    """One after the other."""
    return [run_part(case) for case in cases]


def run_segments(cases: list[Case], segment_size: int) -> list[Any]:
    """run_parts, of parts long enough for several segments."""
    usual, chunked.SEGMENT_SIZE = chunked.SEGMENT_SIZE, segment_size
    try:
        return run_parts(cases)
    finally:
        chunked.SEGMENT_SIZE = usual
