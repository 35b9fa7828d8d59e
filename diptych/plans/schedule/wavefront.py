"""Wavefront order of cp_exchange "pipelined": microbatches pass over context-parallel ranks as over pipeline stages.

For every layer, a rank needs the recurrent state, the last few tokens, and the keys and values of the previous rank. It
receives them, computes the layer, and immediately sends its own to the next rank. Ranks compute concurrently because
they work at different positions, so no state transitions are built or composed:

    PyTorch     a rank is one layer behind the previous rank; backward runs from the last rank to the first
    JAX         rank r computes microbatch t - r in lock-step slot t; backward runs from the last rank to the first;
                m + R - 1 slots each

A rank has the warm-up forwards of 1f1b, with parts of sequences in place of stages. The reason: if two neighbouring
ranks had the same number a of warm-up forwards, F(i) would start on the second rank one layer after the first, B(i)
would start there a (F + B) + F later, and on the first rank one more layer later. Only then could the first rank start
F(i + a + 1), so that every a + 1 microbatches would cost one layer's F + B extra. With one more warm-up forward, the
first rank pays this delay once per step.
"""

from diptych.plans.schedule.actions import Action
from diptych.plans.schedule.named import context_schedule


def makespan(
    size: int,
    num_microbatches: int,
    num_layers: int,
    forward: float = 1.0,
    backward: float = 2.0,
    communication: float = 0.0,
) -> float:
    """Return the time of a step in which every rank runs its context_schedule layer by layer.

    Args:
        size: number of context-parallel ranks.
        num_microbatches: microbatches per step.
        num_layers: number of layers of the model, all with equal times.
        forward: forward time of a rank's part of one microbatch, all layers together; any unit.
        backward: backward time of the same part; same unit.
        communication: time from the end of a layer to the arrival of its messages; same unit.
    """
    orders = [context_schedule(size, rank, num_microbatches).actions[0] for rank in range(size)]
    done: dict[tuple[int, Action], list[float]] = {}
    times = [0.0] * size
    positions = [0] * size
    while any(position < len(order) for position, order in zip(positions, orders, strict=True)):
        moved = False
        for rank, order in enumerate(orders):
            while positions[rank] < len(order):
                action = order[positions[rank]]
                sender = rank - 1 if action.kind == "F" else rank + 1
                sent = done.get((sender, action)) if 0 <= sender < size else [float("-inf")] * num_layers
                if sent is None:
                    break
                layer_time = (forward if action.kind == "F" else backward) / num_layers
                ends = []
                for time in sent:
                    times[rank] = max(times[rank], time + communication) + layer_time
                    ends.append(times[rank])
                done[rank, action] = ends
                positions[rank] += 1
                moved = True
        assert moved, "every rank waits for another"
    return max(times)


def tokens_before(size: int, part: int, length: int) -> list[int]:
    """Return, for every rank, the number of tokens of its first sequence that are placed on previous ranks.

    Args:
        size: number of context-parallel ranks.
        part: tokens per rank.
        length: tokens per sequence; sequences follow each other without gaps.
    """
    return [rank * part % length for rank in range(size)]


def num_lockstep_slots(size: int, num_microbatches: int) -> int:
    """Return the number of lock-step slots of the forwards, and equally of the backwards, in JAX."""
    return num_microbatches + size - 1
