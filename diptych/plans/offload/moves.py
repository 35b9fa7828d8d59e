"""What moves when layers are used in a given order."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from diptych.plans.config import TransformerConfig
from diptych.plans.mesh import undivided
from diptych.plans.model.parameters import parameter_specs
from diptych.plans.offload.uses import Use, action_uses, next_layers
from diptych.plans.schedule.named import schedule_for


class Step(NamedTuple):
    """A use, and what moves around it."""

    use: Use
    fetches: tuple[int, ...]
    """Layers whose copy to the device is issued when the use begins, in this order."""
    evictions: tuple[int, ...]
    """Layers that leave the device when the use has ended."""

    def __str__(self) -> str:
        return " ".join([*(f"+{layer}" for layer in self.fetches), str(self.use), *(f"-{x}" for x in self.evictions)])


@dataclass(frozen=True)
class OffloadPlan:
    """The moves of a sequence of uses, and what they cost."""

    steps: tuple[Step, ...]
    peak_bytes: int
    """Most bytes of offloaded layers on the device at once."""
    bytes_in: int
    """Bytes copied from host to device."""
    bytes_out: int
    """Bytes copied from device to host: those of layers the optimizer has changed."""
    late: tuple[int, ...]
    """Places in ``steps`` of uses that have to wait for their whole copy: it was issued when they began."""


def plan_offload(
    uses: Sequence[Use],
    storages: Mapping[int, Mapping[str, int]],
    num_prefetch_layers: int = 1,
    resident: Iterable[int] = (),
    then: Sequence[Use] | None = None,
) -> OffloadPlan:
    """What moves when layers are used in an order that is known.

    Args:
        uses: in order.
        storages: bytes of every memory that a layer has; layers that share one name it alike, and it moves once.
        num_prefetch_layers: layers fetched ahead of the one in use.
        resident: layers that are there before the first use.
        then: what comes after the last use; None: the same again.

    Raises:
        ValueError: a use of an unknown layer; fewer than 0 layers ahead.
    """
    check_num_prefetch_layers(num_prefetch_layers)
    unknown = {use.layer for use in uses} - storages.keys()
    if unknown:
        raise ValueError(f"uses: expected layers of {sorted(storages)}, got {sorted(unknown)}")
    place = _Place(storages, resident)
    steps: list[Step] = []
    late = []
    ahead = [*uses, *(uses if then is None else then)]
    for number, use in enumerate(uses):
        if use.layer not in place.layers:
            late.append(number)
        window = next_layers(ahead[number:], num_prefetch_layers + 1)
        fetches = tuple(layer for layer in window if layer not in place.layers)
        for layer in fetches:
            place.fetch(layer)
        if use.kind == "S":
            place.changed |= storages[use.layer].keys()
        keep = next_layers(ahead[number + 1 :], num_prefetch_layers + 1)
        evictions = tuple(layer for layer in place.layers if layer not in keep)
        for layer in evictions:
            place.evict(layer)
        steps.append(Step(use, fetches, evictions))
    return OffloadPlan(tuple(steps), place.peak_bytes, place.bytes_in, place.bytes_out, tuple(late))


def unmoved(uses: Iterable[Use]) -> tuple[Step, ...]:
    """The plan of layers that are on the device all the time."""
    return tuple(Step(use, (), ()) for use in uses)


def join_plans(plans: Sequence[OffloadPlan]) -> OffloadPlan:
    """Plans that are carried out one after the other, at whose ends nothing is on the device."""
    begins = accumulate((len(plan.steps) for plan in plans), initial=0)
    return OffloadPlan(
        tuple(step for plan in plans for step in plan.steps),
        max((plan.peak_bytes for plan in plans), default=0),
        sum(plan.bytes_in for plan in plans),
        sum(plan.bytes_out for plan in plans),
        tuple(begin + place for begin, plan in zip(begins, plans, strict=False) for place in plan.late),
    )


def plan_actions(
    config: TransformerConfig, num_microbatches: int, pp_rank: int = 0, forward_only: bool = False
) -> OffloadPlan:
    """What moves on a rank where no copy reaches from one action of its schedule into the next.

    So it is where an action is a branch of a compiled program, which ends with nothing under way: the first layer of
    every action is late, and the others come ahead of their uses as everywhere.

    Args: as rank_uses'.
    """
    storages, ahead = layer_storages(config), config.tensor_offload_num_prefetch_layers
    actions = schedule_for(config, num_microbatches, forward_only).actions[pp_rank]
    return join_plans(
        [plan_offload(action_uses(config, action, pp_rank), storages, ahead, then=()) for action in actions]
    )


def check_num_prefetch_layers(number: int) -> None:
    """Refuse what is no number of layers.

    Raises:
        ValueError: negative, or no integer.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"num_prefetch_layers: expected an integer >= 0, got {number!r}")


def layer_storages(config: TransformerConfig) -> dict[int, dict[str, int]]:
    """Bytes of every parameter of every layer, by the layer's number and the parameter's name."""
    storages: dict[int, dict[str, int]] = {layer: {} for layer in range(config.num_layers)}
    width = np.dtype(config.params_dtype).itemsize
    for name, spec in parameter_specs(undivided(config)).items():
        if name.startswith("decoder.layers."):
            storages[int(name.split(".")[2])][name] = math.prod(spec.shape) * width
    return storages


class _Place:
    """The device, as far as offloaded layers go."""

    def __init__(self, storages: Mapping[int, Mapping[str, int]], resident: Iterable[int]) -> None:
        self._storages = storages
        self.layers = list(resident)
        self.changed: set[str] = set()
        self.bytes_in = self.bytes_out = 0
        self.peak_bytes = self._bytes_here()

    def fetch(self, layer: int) -> None:
        here = self._here()
        self.bytes_in += sum(size for name, size in self._storages[layer].items() if name not in here)
        self.layers.append(layer)
        self.peak_bytes = max(self.peak_bytes, self._bytes_here())

    def evict(self, layer: int) -> None:
        self.layers.remove(layer)
        gone = self._storages[layer].keys() - self._here().keys()
        self.bytes_out += sum(self._storages[layer][name] for name in gone & self.changed)
        self.changed -= gone

    def _here(self) -> dict[str, int]:
        return dict(chain.from_iterable(self._storages[layer].items() for layer in self.layers))

    def _bytes_here(self) -> int:
        return sum(self._here().values())
