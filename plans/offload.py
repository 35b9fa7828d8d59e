"""Offload: which layer's parameters move between device and host, and when.

A layer lies on the device while it is used and while it is one of the next layers to be used; else only its copy on
the host is there. All that decides is the order of uses: the layers' forwards (F), replays of a forward during
backward (R), backwards (B) and optimizer updates (S). When a use begins, the layers of the window are fetched that are
not there: the used one, and the next ``num_prefetch_layers`` others in the order of uses. When it ends, a layer
outside the next window is evicted; its memory is dropped, and written back first only if the optimizer has changed it.
So at most ``num_prefetch_layers + 1`` layers are ever there, and around a turn (last forward to first backward)
nothing moves.

Both backends move what :func:`next_layers` says; :func:`plan_offload` is the same, ahead of time, and
:func:`simulate_offload` adds time.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from plans.config import TransformerConfig
from plans.partition import get_num_layers_to_build, get_transformer_layer_offset
from plans.recompute import RecomputeBlock, recompute_blocks
from plans.schedule import schedule_for


class Use(NamedTuple):
    """One use of a layer's parameters."""

    kind: str
    """F forward, R its replay, B backward, S optimizer step."""
    layer: int

    def __str__(self) -> str:
        return f"{self.kind}{self.layer}"


class Step(NamedTuple):
    """A use, and what moves around it."""

    use: Use
    fetches: tuple[int, ...]
    """Layers whose copy to the device is issued when the use begins, in this order."""
    evictions: tuple[int, ...]
    """Layers that leave the device when the use has ended."""

    def __str__(self) -> str:
        return " ".join([*(f"+{layer}" for layer in self.fetches), str(self.use), *(f"-{x}" for x in self.evictions)])


def next_layers(upcoming: Iterable[Use], count: int) -> tuple[int, ...]:
    """The first ``count`` different layers that uses need, in the order in which they need them."""
    found: dict[int, None] = {}
    for use in upcoming:
        if len(found) == count:
            break
        found.setdefault(use.layer)
    return tuple(found)


# In which order layers are used.


def pass_uses(
    layers: Sequence[int], backward: bool, blocks: Sequence[RecomputeBlock] = (), forward: bool = True
) -> list[Use]:
    """Uses of one microbatch's forward, or backward, or both, through some layers.

    Args:
        layers: in the order of forward.
        backward: whether backward is run.
        blocks: what is recomputed. All layers of a block but its last are replayed, in order, before the last's
            backward; the last's replay is part of its backward.
        forward: whether forward is run.
    """
    uses = [Use("F", layer) for layer in layers] if forward else []
    if backward:
        replayed = {block.layers[-1]: block.layers[:-1] for block in blocks if replays_layers(block)}
        for layer in reversed(layers):
            uses += [Use("R", other) for other in replayed.get(layer, ())]
            uses.append(Use("B", layer))
    return uses


def replays_layers(block: RecomputeBlock) -> bool:
    """Whether a block's replay goes through its layers, reading their parameters, before their backwards.

    It does where what one layer hands the next is dropped. Else each layer's replay is within its own backward.
    """
    return "residual_streams" in block.dropped


def step_uses(layers: Sequence[int], num_microbatches: int = 1, blocks: Sequence[RecomputeBlock] = ()) -> list[Use]:
    """Uses of a training step without a pipeline: every microbatch's forward and backward, then the optimizer's."""
    return pass_uses(layers, True, blocks) * num_microbatches + [Use("S", layer) for layer in layers]


def rank_uses(
    config: TransformerConfig, num_microbatches: int, pp_rank: int = 0, forward_only: bool = False
) -> list[Use]:
    """Uses of one rank's layers in a step's forwards and backwards, in the order of the pipeline's schedule.

    The gradients of weights alone (W) need no weights.

    Args:
        config: the model's; without a pipeline its only rank runs one microbatch after the other.
        num_microbatches: of a step.
        pp_rank: the rank.
        forward_only: evaluation.
    """
    uses = []
    for action in schedule_for(config, num_microbatches, forward_only).actions[pp_rank]:
        vp_stage = action.stage // config.pipeline_model_parallel_size
        layers = stage_layers(config, vp_stage, pp_rank)
        if action.kind == "F":
            uses += pass_uses(layers, backward=False)
        elif action.kind in ("B", "I"):
            uses += pass_uses(layers, True, recompute_blocks(config, vp_stage, pp_rank), forward=False)
    return uses


def rank_layers(config: TransformerConfig, pp_rank: int = 0) -> list[int]:
    """Global numbers of all layers of a rank, stage by stage."""
    stages = range(config.virtual_pipeline_model_parallel_size or 1)
    return [layer for vp_stage in stages for layer in stage_layers(config, vp_stage, pp_rank)]


def stage_layers(config: TransformerConfig, vp_stage: int = 0, pp_rank: int = 0) -> range:
    """Global numbers of a stage's layers."""
    first = get_transformer_layer_offset(config, vp_stage, pp_rank)
    return range(first, first + get_num_layers_to_build(config, vp_stage, pp_rank))


def expected_uses(layers: Sequence[int], last: Use, training: bool) -> Iterator[Use]:
    """What most likely comes after a use, without end, where nobody has said what does.

    Args:
        layers: in the order in which forward has used them.
        last: the use.
        training: whether backward follows forward.
    """
    kind, place = last.kind, layers.index(last.layer)
    after = [Use("F", layer) for layer in layers]
    if kind == "S":
        yield from (Use("S", layer) for layer in layers[place + 1 :])
    elif kind == "F":
        yield from after[place + 1 :]
    if training and kind != "S":
        before = layers if kind == "F" else layers[:place]
        yield from (Use("B", layer) for layer in reversed(before))
        yield from (Use("S", layer) for layer in layers)
    while True:
        yield from after


# What moves.


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


def check_num_prefetch_layers(number: int) -> None:
    """Refuse what is no number of layers.

    Raises:
        ValueError: negative, or no integer.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(f"num_prefetch_layers: expected an integer >= 0, got {number!r}")


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


def describe_statistics(stats: Mapping[str, Any]) -> str:
    """What has been moved, as a table of text.

    Args:
        stats: ``copies_in``, ``copies_out``, ``bytes_in``, ``bytes_out``, ``hits``, ``misses``, ``peak_layers``,
            ``peak_bytes``, and ``seconds_waited`` where it was measured.
    """
    mib = {name: f"{stats[name] / 2**20:,.1f}" for name in ("bytes_in", "bytes_out", "peak_bytes")}
    uses, waited = stats["hits"] + stats["misses"], stats.get("seconds_waited")
    return "\n".join(
        [
            f"{'offload':10}{'to device':>14}{'to host':>14}",
            f"{'copies':10}{stats['copies_in']:>14,}{stats['copies_out']:>14,}",
            f"{'MiB':10}{mib['bytes_in']:>14}{mib['bytes_out']:>14}",
            f"{stats['misses']:,} of {uses:,} uses of a layer came before it was asked for",
            f"at most {stats['peak_layers']} layers, {mib['peak_bytes']} MiB of them on the device"
            + ("" if waited is None else f"; waited {waited:.3f} s for copies"),
        ]
    )


# How long it takes.


@dataclass(frozen=True)
class OffloadTimes:
    """Seconds of a plan on a device and a link that work at the same time."""

    makespan: float
    compute: float
    transfer: float
    waited: tuple[float, ...]
    """For each use, how long the device waits for its layer."""


def simulate_offload(
    plan: OffloadPlan,
    seconds: Callable[[Use], float],
    storages: Mapping[int, Mapping[str, int]],
    bandwidth: float,
    latency: float = 0.0,
) -> OffloadTimes:
    """Run a plan in time: one device, one link that copies one layer after the other.

    A copy starts when the link is free and the use before has ended, whose memory it may take.

    Args:
        plan: of plan_offload.
        seconds: how long a use computes.
        storages: as plan_offload's.
        bandwidth: bytes a second.
        latency: seconds before each copy.
    """
    now = link = compute = transfer = 0.0
    ready: dict[int, float] = {}
    changed: set[int] = set()
    waited = []

    def copy(layer: int) -> float:
        nonlocal link, transfer
        lasts = latency + sum(storages[layer].values()) / bandwidth
        link, transfer = max(link, now) + lasts, transfer + lasts
        return link

    for step in plan.steps:
        for layer in step.fetches:
            ready[layer] = copy(layer)
        waited.append(max(0.0, ready.get(step.use.layer, 0.0) - now))
        now += waited[-1] + seconds(step.use)
        compute += seconds(step.use)
        if step.use.kind == "S":
            changed.add(step.use.layer)
        for layer in changed.intersection(step.evictions):
            now = copy(layer)  # its memory is taken by the next layer
            changed.remove(layer)
    return OffloadTimes(now, compute, transfer, tuple(waited))
