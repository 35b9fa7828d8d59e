"""Which activations move when layers are used in a given order."""

from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from diptych.plans.offload.uses import Use


class ActivationStep(NamedTuple):
    """A use, and which layers' activations move around it."""

    use: Use
    fetches: tuple[Use, ...]
    """Forwards whose activations begin to come back when the use begins, in this order."""
    leaves: bool
    """Whether the forward's own activations leave when it has ended."""

    def __str__(self) -> str:
        fetched = [activation_event("+", forward) for forward in self.fetches]
        return " ".join([*fetched, str(self.use), *([activation_event("-", self.use)] if self.leaves else [])])


def activation_event(sign: str, forward: Use) -> str:
    """How a trace tells that a forward's activations come (+) or leave (-): ``-a3.0``, of layer 3, microbatch 0."""
    return f"{sign}a{forward.layer}.{forward.microbatch}"


def next_backwards(upcoming: Iterable[Use], count: int) -> tuple[Use, ...]:
    """The forwards whose backwards come next."""
    backwards = (use._replace(kind="F") for use in upcoming if use.kind == "B")
    return tuple(islice(backwards, count))


def plan_activations(
    uses: Sequence[Use],
    num_prefetch_layers: int = 1,
    then: Sequence[Use] | None = None,
    dropped: Collection[int] = (),
) -> tuple[ActivationStep, ...]:
    """Which activations move: those of a forward leave unless its backward is one of the next that come.

    They come back when their backward is one of the next ``num_prefetch_layers`` after the one that begins, or when
    they are replayed.

    Args:
        uses: in order.
        num_prefetch_layers: backwards ahead of the one that runs.
        then: what comes after the last use; None: the same again.
        dropped: layers that are recomputed whole: they keep nothing that could move.
    """
    ahead = [*uses, *(uses if then is None else then)]
    made, here, steps = set(), set(), []
    for number, use in enumerate(uses):
        fetches, leaves = (), False
        after = (u.kind for u in ahead[number + 1 :] if u[1:] == use[1:] and u.kind in ("F", "B"))
        if use.kind == "F" and use.layer not in dropped and next(after, None) == "B":
            leaves = use not in next_backwards(ahead[number + 1 :], num_prefetch_layers + 1)
            made.add(use)
            if not leaves:
                here.add(use)
        elif use.kind in ("B", "R"):
            forward = use._replace(kind="F")
            window = next_backwards(ahead[number:], num_prefetch_layers + 1) if use.kind == "B" else (forward,)
            fetches = tuple(forward for forward in window if forward in made - here)
            here |= set(fetches)
            if use.kind == "B":
                made.discard(forward)
                here.discard(forward)
        steps.append(ActivationStep(use, fetches, leaves))
    return tuple(steps)
