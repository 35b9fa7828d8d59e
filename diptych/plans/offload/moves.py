"""Plan of parameter offload for a given order of layer uses."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

from diptych.plans.config import ITEM_SIZES, TransformerConfig
from diptych.plans.mesh import unsharded
from diptych.plans.model.parameters import parameter_specs
from diptych.plans.offload.uses import Use, action_uses, next_layers
from diptych.plans.optimizer_shards import stored_dtype
from diptych.plans.schedule.named import schedule_for
from diptych.plans.tensor_parallel import rank_config


class UseMoves(NamedTuple):
    """A use of a layer, with the layers that move at its start and end."""

    use: Use
    """The use."""
    fetches: tuple[int, ...]
    """Layers whose copy to the device is issued when the use begins, in this order."""
    evictions: tuple[int, ...]
    """Layers that leave the device when the use ends."""

    def __str__(self) -> str:
        return " ".join([*(f"+{layer}" for layer in self.fetches), str(self.use), *(f"-{x}" for x in self.evictions)])


@dataclass(frozen=True)
class OffloadPlan:
    """The moves of a sequence of uses, and their costs."""

    moves: tuple[UseMoves, ...]
    """Uses with their moves, in order."""
    peak_bytes: int
    """Peak number of bytes of offloaded layers on the device."""
    bytes_in: int
    """Bytes copied from host to device."""
    bytes_out: int
    """Bytes copied from device to host, only for layers that the optimizer changed."""
    misses: tuple[int, ...]
    """Indices in ``moves`` of uses that wait for their full copy, because it is issued when they begin."""


EMPTY_PLAN = OffloadPlan((), 0, 0, 0, ())
"""The plan of no uses."""


def plan_offload(
    uses: Sequence[Use],
    storages: Mapping[int, Mapping[str, int]],
    num_prefetch_layers: int = 1,
    resident: Iterable[int] = (),
    then: Sequence[Use] | None = None,
) -> OffloadPlan:
    """Plan the moves of layers between device and host.

    Args:
        uses: uses of the layers, in order.
        storages: bytes of every storage of a layer, by layer and name; a name shared by layers moves once.
        num_prefetch_layers: layers fetched ahead of the current one.
        resident: layers on the device before the first use.
        then: uses after the last one; None: ``uses`` repeats.

    Raises:
        ValueError: a used layer is unknown, or num_prefetch_layers is negative.
    """
    check_num_prefetch_layers(num_prefetch_layers)
    unknown = {use.layer for use in uses} - storages.keys()
    if unknown:
        raise ValueError(f"uses: expected layers of {sorted(storages)}, got {sorted(unknown)}")
    device = _DeviceLayers(storages, resident)
    moves: list[UseMoves] = []
    misses = []
    ahead = [*uses, *(uses if then is None else then)]
    for number, use in enumerate(uses):
        if use.layer not in device.layers:
            misses.append(number)
        window = next_layers(ahead[number:], num_prefetch_layers + 1)
        fetches = tuple(layer for layer in window if layer not in device.layers)
        for layer in fetches:
            device.fetch(layer)
        if use.kind == "S":
            device.changed |= storages[use.layer].keys()
        keep = next_layers(ahead[number + 1 :], num_prefetch_layers + 1)
        evictions = tuple(layer for layer in device.layers if layer not in keep)
        for layer in evictions:
            device.evict(layer)
        moves.append(UseMoves(use, fetches, evictions))
    return OffloadPlan(tuple(moves), device.peak_bytes, device.bytes_in, device.bytes_out, tuple(misses))


def unmoved(uses: Iterable[Use]) -> tuple[UseMoves, ...]:
    """Return uses of layers that stay on the device."""
    return tuple(UseMoves(use, (), ()) for use in uses)


def join_plans(plans: Sequence[OffloadPlan]) -> OffloadPlan:
    """Concatenate plans that each end with no layer on the device."""
    begins = accumulate((len(plan.moves) for plan in plans), initial=0)
    return OffloadPlan(
        tuple(each for plan in plans for each in plan.moves),
        max((plan.peak_bytes for plan in plans), default=0),
        sum(plan.bytes_in for plan in plans),
        sum(plan.bytes_out for plan in plans),
        tuple(begin + place for begin, plan in zip(begins, plans, strict=False) for place in plan.misses),
    )


def plan_actions(
    config: TransformerConfig,
    num_microbatches: int,
    pp_rank: int = 0,
    forward_only: bool = False,
    replays_stages: bool = False,
) -> OffloadPlan:
    """Plan the moves on a rank whose copies do not overlap from one action of the schedule to the next.

    This is the case if an action is a branch of a compiled program, which must finish all its copies. The first layer
    of every action is then a miss, and the others are prefetched. See rank_uses and action_uses for the arguments.
    """
    storages = layer_storages(config)
    ahead = config.tensor_offload_num_prefetch_layers
    actions = schedule_for(config, num_microbatches, forward_only).actions[pp_rank]
    uses = [action_uses(config, action, pp_rank, replays_stages) for action in actions]
    return join_plans([plan_offload(each, storages, ahead, then=()) for each in uses])


def split_first_pass(passes: Sequence[tuple[UseMoves, ...]]) -> tuple[tuple[int, ...], tuple[UseMoves, ...]]:
    """Return the layers fetched before the first pass, and the uses that are equal for every pass of the loop."""
    if len(passes) == 1:
        return (), passes[0]
    passes = [tuple(s._replace(use=s.use._replace(microbatch=0)) for s in one) for one in passes]
    first, *others = passes[0]
    looped = passes[1]
    begin = tuple(layer for layer in first.fetches if layer not in looped[0].fetches)
    first_looped = first._replace(fetches=looped[0].fetches), *others
    assert all(one == looped for one in (first_looped, *passes[1:])), (
        "the plan moves other layers in one microbatch than in another"
    )
    return begin, looped


def layers_after(uses: Sequence[UseMoves], on_device: Iterable[int]) -> tuple[int, ...]:
    """Return the layers on the device after some uses, given those before."""
    layers = dict.fromkeys(on_device)
    for moves in uses:
        layers |= dict.fromkeys(moves.fetches)
        for layer in moves.evictions:
            del layers[layer]
    return tuple(layers)


def check_num_prefetch_layers(number: int) -> None:
    """Reject an invalid number of prefetched layers.

    Raises:
        ValueError: the number is negative or not an integer.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"num_prefetch_layers: expected an integer >= 0, got {number!r}")


def layer_storages(config: TransformerConfig) -> dict[int, dict[str, int]]:
    """Return the bytes of every parameter that a rank holds, by layer number and parameter name."""
    storages: dict[int, dict[str, int]] = {layer: {} for layer in range(config.num_layers)}
    for name, spec in parameter_specs(unsharded(rank_config(config))).items():
        if name.startswith("decoder.layers."):
            width = ITEM_SIZES[stored_dtype(config, name, spec.shape)]
            storages[int(name.split(".")[2])][name] = math.prod(spec.shape) * width
    return storages


class _DeviceLayers:
    """The offloaded layers on the device, with counters of the copied bytes."""

    def __init__(self, storages: Mapping[int, Mapping[str, int]], resident: Iterable[int]) -> None:
        self._storages = storages
        self.layers = list(resident)
        self.changed: set[str] = set()
        self.bytes_in = 0
        self.bytes_out = 0
        self.peak_bytes = self._resident_bytes()

    def fetch(self, layer: int) -> None:
        """Move a layer to the device, and count the bytes that no resident layer shares."""
        resident = self._resident()
        self.bytes_in += sum(size for name, size in self._storages[layer].items() if name not in resident)
        self.layers.append(layer)
        self.peak_bytes = max(self.peak_bytes, self._resident_bytes())

    def evict(self, layer: int) -> None:
        """Remove a layer from the device, and count the changed bytes that are copied to the host."""
        self.layers.remove(layer)
        released = self._storages[layer].keys() - self._resident().keys()
        self.bytes_out += sum(self._storages[layer][name] for name in released & self.changed)
        self.changed -= released

    def _resident(self) -> dict[str, int]:
        """Return the bytes of the storages on the device, by name."""
        return dict(chain.from_iterable(self._storages[layer].items() for layer in self.layers))

    def _resident_bytes(self) -> int:
        return sum(self._resident().values())
