"""Messages of a pipeline rank that take memory beside its actions: received early, sent and maybe not yet received."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

from diptych.plans.schedule.actions import Action, Schedule
from diptych.plans.schedule.messages import Message, Program, dependencies, lower


def most_in_transit(schedule: Schedule) -> list[list[int]]:
    """Return for each rank the largest number of messages in transit during each of its actions, in their order.

    A buffer exists for each receive that is posted and not used by an earlier action or this one; receives are posted
    before the action that precedes them. A sent message counts until it has certainly arrived: until the rank uses a
    message that the receiver sent after using this one. A result for another stage of the same rank counts until that
    stage has taken it. Every message counts as one, of activations as of gradients.
    """
    program = lower(schedule)
    places = [{step: place for place, step in enumerate(steps)} for steps in program]
    users = {
        needed: action
        for actions in schedule.actions
        for action in actions
        for needed in dependencies(schedule, action)
        if needed.stage != action.stage
    }
    found = []
    for rank, steps in enumerate(program):
        ends = [place for place, step in enumerate(steps) if isinstance(step, Action)]
        changes = [0] * (len(ends) + 1)
        for begin, end in _lifetimes(rank, program, places, users):
            first = bisect_right(ends, begin)
            last = bisect_right(ends, end - 1)
            if first < last:
                changes[first] += 1
                changes[last] -= 1
        counts = []
        total = 0
        for change in changes[:-1]:
            total += change
            counts.append(total)
        found.append(counts)
    return found


def _lifetimes(
    rank: int, program: Program, places: Sequence[Mapping[Action | Message, int]], users: Mapping[Action, Action]
) -> Iterator[tuple[int, int]]:
    """Yield for each message the place in a rank's program after which it takes memory, and the one where that ends.

    Args:
        rank: the rank.
        program: programs of all ranks.
        places: places of the steps in each program.
        users: the action of another stage that uses the result of an action.
    """
    steps = program[rank]
    own = places[rank]
    proofs: dict[int, list[tuple[int, int]]] = {}
    for step in steps:
        if isinstance(step, Message) and step.direction == "RECV":
            sent = places[step.peer][Message("SEND", step.produced_by, rank)]
            proofs.setdefault(step.peer, []).append((sent, own[users[step.produced_by]]))
    last_action = 0
    for place, step in enumerate(steps):
        if isinstance(step, Action):
            last_action = place
            if step in users and users[step] in own:
                yield place, own[users[step]]
        elif step.direction == "RECV":  # is posted before the last action starts
            yield last_action - 1, own[users[step.produced_by]]
        else:
            used = places[step.peer][users[step.produced_by]]
            later = [taken for sent, taken in proofs.get(step.peer, []) if sent > used]
            yield place, min(later, default=len(steps))
