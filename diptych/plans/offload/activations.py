"""Plan of activation offload for a given order of layer uses."""

from collections.abc import Collection, Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from diptych.plans.config import TransformerConfig
from diptych.plans.offload.uses import Use
from diptych.plans.recompute import RecomputeBlock


class ActivationMoves(NamedTuple):
    """A use of a layer, with the activations that move at its start and end."""

    use: Use
    """The use."""
    fetches: tuple[Use, ...]
    """Forwards whose activations are fetched from the host when the use begins, in this order."""
    evicts: bool
    """True if the forward's own activations move to the host when the use ends."""

    def __str__(self) -> str:
        fetched = [activation_event("+", forward) for forward in self.fetches]
        return " ".join([*fetched, str(self.use), *([activation_event("-", self.use)] if self.evicts else [])])


def activation_event(sign: str, forward: Use) -> str:
    """Return the trace entry for activations that are fetched (+) or leave (-): ``-a3.0`` is layer 3, microbatch 0."""
    return f"{sign}a{forward.layer}.{forward.microbatch}"


def forwards_needed_next(upcoming: Iterable[Use], count: int) -> tuple[Use, ...]:
    """Return the forwards of the next ``count`` backwards."""
    backwards = (use._replace(kind="F") for use in upcoming if use.kind == "B")
    return tuple(islice(backwards, count))


def layers_that_stay(config: TransformerConfig, blocks: Iterable[RecomputeBlock]) -> set[int]:
    """Return the layers of recompute blocks whose saved values stay on the device.

    They are those that activation_offload_layers does not name, and those that are recomputed whole, which save nothing
    that could move: their input belongs to the block.
    """
    return {n for block in blocks for n in block.layers if block.kind == "full" or config.layer(n).offload is None}


def plan_activations(
    uses: Sequence[Use],
    num_prefetch_layers: int = 1,
    then: Sequence[Use] | None = None,
    stay: Collection[int] = (),
) -> tuple[ActivationMoves, ...]:
    """Plan the moves of activations between device and host.

    A forward's activations move to the host unless its backward is among the next backwards. They are fetched when
    their backward is among the next ``num_prefetch_layers`` after the current one, or when their layer is replayed.

    Args:
        uses: uses of the layers, in order.
        num_prefetch_layers: backwards ahead of the current one.
        then: uses after the last one; None: ``uses`` repeats.
        stay: layers whose activations stay on the device; see layers_that_stay.
    """
    ahead = [*uses, *(uses if then is None else then)]
    saved = set()  # forwards whose backward has not run
    on_device = set()
    steps = []
    for number, use in enumerate(uses):
        fetches = ()
        evicts = False
        after = (u.kind for u in ahead[number + 1 :] if u[1:] == use[1:] and u.kind in ("F", "B"))
        if use.kind == "F" and use.layer not in stay and next(after, None) == "B":
            evicts = use not in forwards_needed_next(ahead[number + 1 :], num_prefetch_layers + 1)
            saved.add(use)
            if not evicts:
                on_device.add(use)
        elif use.kind in ("B", "R"):
            forward = use._replace(kind="F")
            window = forwards_needed_next(ahead[number:], num_prefetch_layers + 1) if use.kind == "B" else (forward,)
            fetches = tuple(forward for forward in window if forward in saved - on_device)
            on_device |= set(fetches)
            if use.kind == "B":
                saved.discard(forward)
                on_device.discard(forward)
        steps.append(ActivationMoves(use, fetches, evicts))
    return tuple(steps)
