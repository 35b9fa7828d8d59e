"""Microbatches that follow one another over ranks that share sequences, as they do over the stages of a pipeline.

What a rank needs of the ranks before it is, of every layer, a state, a few tokens, keys and values. With cp_exchange
"pipelined" it waits for these before it computes the layer, and hands its own on at once. No map is made and composed,
and all ranks compute at the same time only because they are at different places:

    PyTorch     a rank is one layer behind the one before it; backward goes the other way round, the last rank first
    JAX         a tick is one microbatch: forward, rank r is at tick t at microbatch t - r; backward at the same, from
                the other end; m + R - 1 ticks each

A rank's forwards ahead of its first backward are those of 1f1b, where parts of sequences stand for stages. With the
same number a ahead on two ranks in a row the first would wait again and again: F(i) begins there, a layer later on the
second, whose B(i) begins a (F + B) + F after that, and a layer later the first rank's, and only then comes its
F(i + a + 1); so a + 1 microbatches take a layer's F + B more than their work. With one more ahead it waits once a step.
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
    """Time of a step in which every rank runs its context_schedule layer by layer.

    Args:
        size, num_microbatches: see diptych.plans.schedule.named.context_schedule.
        num_layers: of the model, all alike.
        forward, backward: time of a rank's part of one microbatch, through all layers; any unit.
        communication: from the end of a layer to the arrival of what it hands on.
    """
    orders = [context_schedule(size, rank, num_microbatches).actions[0] for rank in range(size)]
    done: dict[tuple[int, Action], list[float]] = {}
    times, places = [0.0] * size, [0] * size
    while any(place < len(order) for place, order in zip(places, orders, strict=True)):
        moved = False
        for rank, order in enumerate(orders):
            while places[rank] < len(order):
                action = order[places[rank]]
                before = rank - 1 if action.kind == "F" else rank + 1
                came = [float("-inf")] * num_layers if not 0 <= before < size else done.get((before, action))
                if came is None:
                    break
                layer_time = (forward if action.kind == "F" else backward) / num_layers
                ends = []
                for arrived in came:
                    times[rank] = max(times[rank], arrived + communication) + layer_time
                    ends.append(times[rank])
                done[rank, action] = ends
                places[rank] += 1
                moved = True
        assert moved, "every rank waits for another"
    return max(times)


def tokens_before(size: int, part: int, length: int) -> list[int]:
    """Of every rank's first sequence, how many tokens lie on the ranks before; 0 where it begins there.

    Args:
        size: number of ranks.
        part: tokens of a rank.
        length: of every sequence; they lie end to end.
    """
    return [rank * part % length for rank in range(size)]


def num_ticks(size: int, num_microbatches: int) -> int:
    """Of a forward, or a backward, in JAX."""
    return num_microbatches + size - 1
