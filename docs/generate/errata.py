"""Programs of the sources' drafts, run as written; docs/history/errata.md contains the output.

python -m docs.generate.errata
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from diptych.plans import TransformerConfig
from diptych.plans.schedule.actions import Action, Schedule, ScheduleError
from diptych.plans.schedule.named import num_warmup_microbatches
from diptych.plans.schedule.validate import validate_schedule
from reference_torch import HyperConnectionModule
from reference_torch.offload import get_offload_manager
from reference_torch.recompute import MHCBlockRecomputeManager, measure_memory


def block_of_hyper_connections() -> Iterator[str]:
    """000: Measure a block of eight hyper-connections, as drafted and with the writes to the streams managed too."""
    config = TransformerConfig(hidden_size=64, num_layers=8, num_attention_heads=1, enable_hyper_connections=True)
    modules = [HyperConnectionModule(config, number) for number in range(8)]
    x = torch.randn(1, 256, 4, 64, requires_grad=True)

    def block(as_drafted: bool) -> Tensor:
        streams = x * 1
        with MHCBlockRecomputeManager() as manager:
            for module in modules:
                y, mixed, h_post = module(streams, streams, mhc_recompute_manager=manager)
                if as_drafted:
                    streams = mixed + module.apply_h_post_with_checkpoint((y, None), h_post, manager)[0]
                else:
                    streams = manager.checkpoint(module.apply_h_post_dropout_add, (y, None), h_post, mixed, None, 0)
            manager.discard_all_outputs_and_register_unified_recompute(streams)
        return streams

    block(False)  # allocates the shared buffer that replaces freed memory
    for name, as_drafted in (("as drafted", True), ("writing managed too", False)):
        saved, _ = measure_memory(lambda: block(as_drafted), lambda y: y.backward(torch.ones_like(y)))  # noqa: B023
        yield f"a block of 8 hyper-connections, {name}, keeps {saved / x.nbytes:.1f} times its streams"


def hook_on_a_sum() -> Iterator[str]:
    """000: Register a hook on the sum of the outputs of a block."""
    x = torch.ones(3, requires_grad=True)
    fired: list[Tensor] = []
    output = x * 2
    output.sum().register_hook(fired.append)
    (output**2).sum().backward()
    yield f"a hook on the sum of what the block returns fires {len(fired)} times"


def one_forward_one_backward(p: int = 4, m: int = 8) -> Iterator[str]:
    """001: Validate the 1F1B loop as a schedule."""

    def as_written(rank: int, forward_only: bool) -> tuple[Action, ...]:
        warmup = num_warmup_microbatches(rank, p, m)
        actions = [Action("F", rank, i) for i in range(warmup)]
        if not forward_only:
            for i in range(warmup, m):
                actions += [Action("F", rank, i), Action("B", rank, i)]
            actions += [Action("B", rank, m - 1)] * (m - warmup)
        return tuple(actions)

    for name, forward_only in (("training", False), ("forward only", True)):
        actions = tuple(as_written(rank, forward_only) for rank in range(p))
        try:
            validate_schedule(Schedule("as written", p, m, 1, actions, forward_only))
        except ScheduleError as error:
            yield f"{name}: {error}"


def freed_outputs() -> Iterator[str]:
    """001: Replace the data of an output by a scalar, for operations that do and do not save their output."""
    for name, function in (("multiplication", lambda x: x * 2), ("exp", torch.exp)):
        output = function(torch.ones(8, requires_grad=True))
        memory = StorageWeakRef(output.untyped_storage())
        output.data = torch.empty(1)
        yield f"the memory of an output of {name} is {'freed' if memory.expired() else 'still there'}"


def recurrence(tokens: int = 64, width: int = 16) -> Iterator[str]:
    """002: Compare the delta rule error before the decay of the state with the error after it."""
    draw = np.random.default_rng(0)
    q, k, v = (draw.normal(size=(tokens, width)) for _ in range(3))
    k /= np.linalg.norm(k, axis=1, keepdims=True)
    gamma = np.exp(-draw.uniform(0, 0.5, tokens))
    beta = draw.uniform(0, 1, tokens)

    def outputs(decay_first: bool) -> np.ndarray:
        state = np.zeros((width, width))
        found = []
        for t in range(tokens):
            decayed = gamma[t] * state
            error = v[t] - (decayed if decay_first else state).T @ k[t]
            state = decayed + beta[t] * np.outer(k[t], error)
            found.append(state.T @ q[t])
        return np.array(found)

    yield f"the recurrence as written: outputs {_off(outputs(False), outputs(True))} off"


def states_of_ranks(ranks: int = 4, key: int = 16, value: int = 8) -> Iterator[str]:
    """002: Compute the gradient that later ranks send to rank 0, and the prefix sum over the ranks before rank 3."""
    draw = np.random.default_rng(1)
    transitions = draw.normal(size=(ranks, key, key)) / 4
    added, weights = draw.normal(size=(2, ranks, key, value))

    def initial_states(added: np.ndarray) -> np.ndarray:
        states = [np.zeros((key, value))]
        for r in range(ranks - 1):
            states.append(transitions[r] @ states[-1] + added[r])
        return np.array(states)

    # The loss, sum of weights times states, is linear in what rank 0 adds: unit steps give its gradient.
    steps = np.zeros((key * value, *added.shape))
    steps[:, 0] = np.eye(key * value).reshape(-1, key, value)
    exact = np.array([(initial_states(steps[i]) * weights).sum() for i in range(key * value)]).reshape(key, value)

    def gradient_error(maps: np.ndarray, order: Sequence[int]) -> str:
        gradient = np.zeros((key, value))
        for r in order:
            gradient = maps[r] @ gradient + weights[r]
        return _off(gradient, exact)

    transposed = transitions.swapaxes(1, 2)
    yield f"gradients of states by M^T, farthest rank first: {gradient_error(transposed, [3, 2, 1])} off"
    by_m = gradient_error(transitions, [3, 2, 1])
    yield f"by M: {by_m} off; nearest first: {gradient_error(transposed, [1, 2, 3])} off"
    prefix = [np.eye(key)]
    for transition in transitions:
        prefix.append(transition @ prefix[-1])
    summed = np.sum([prefix[3 - i] @ added[i] for i in range(3)], axis=0)
    yield f"the prefix sum as written: {_off(summed, initial_states(added)[3])} off"


def _off(found: np.ndarray, true: np.ndarray) -> str:
    return f"{np.linalg.norm(found - true) / np.linalg.norm(true):.0%}"


def order_of_gradients() -> Iterator[str]:
    """004: Record the order in which hooks on a layer's tensors fire."""
    layer = torch.nn.Linear(4, 4)
    order: list[str] = []
    x = torch.randn(2, 4, requires_grad=True)
    y = layer(x)
    for name, tensor in (("output", y), ("input", x), ("weight", layer.weight)):
        tensor.register_hook(lambda gradient, name=name: order.append(name))
    y.sum().backward()
    yield f"a layer's gradients come in this order: {', '.join(order)}"


def exchanged_parameters() -> Iterator[str]:
    """004: Replace the data of a parameter between forward and backward."""
    for name, function in (("linear", torch.nn.functional.linear), ("matmul", lambda x, weight: x @ weight)):
        x = torch.ones(2, 8, requires_grad=True)
        weight = torch.nn.Parameter(torch.ones(8, 8))
        memory = StorageWeakRef(weight.untyped_storage())
        y = function(x, weight)
        weight.data = torch.zeros(8, 8)
        there = "freed" if memory.expired() else "still there"
        y.sum().backward()
        assert x.grad is not None
        read = "new" if (x.grad == 0).all() else "old"
        yield f"{name}: the exchanged parameter's memory is {there}, backward reads the {read}"


def manager_made_last() -> Iterator[str]:
    """004: Ask for the offload manager before it exists, as layers do while the model is built."""
    yield f"before the manager is made, layers get {get_offload_manager()}"


PROGRAMS = (
    block_of_hyper_connections,
    hook_on_a_sum,
    one_forward_one_backward,
    freed_outputs,
    recurrence,
    states_of_ranks,
    manager_made_last,
    order_of_gradients,
    exchanged_parameters,
)


def main() -> None:
    """Run all programs and print their output."""
    for program in PROGRAMS:
        assert program.__doc__ is not None
        for line in program():
            print(f"{program.__doc__[:3]}  {line}")


if __name__ == "__main__":
    main()
