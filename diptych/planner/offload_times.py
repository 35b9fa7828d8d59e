"""Predicted time of an offload plan on a device and a host link that work concurrently."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from diptych.plans.config import TransformerConfig
from diptych.plans.offload.moves import OffloadPlan, layer_storages
from diptych.plans.offload.uses import Use


def min_tokens_for_overlap(config: TransformerConfig, bandwidth: float, rate: float) -> float:
    """Return the smallest number of tokens in a microbatch at which copies overlap fully with computation.

    A forward multiplies and adds once per parameter and token, a backward twice; so copies that take no longer than
    forwards take no longer than backwards either.

    Args:
        config: the model.
        bandwidth: bandwidth of the link, bytes per second.
        rate: rate of the device, floating-point operations per second.
    """
    return np.dtype(config.params_dtype).itemsize * rate / (2.0 * bandwidth)


def use_seconds(config: TransformerConfig, tokens: int, rate: float) -> Callable[[Use], float]:
    """Return a function that estimates the seconds of a use, from its products with weights alone.

    Args:
        config: the model.
        tokens: tokens of a microbatch.
        rate: rate of the device, floating-point operations per second.
    """
    width = np.dtype(config.params_dtype).itemsize
    parameters = {layer: sum(sizes.values()) / width for layer, sizes in layer_storages(config).items()}
    products = {"F": 2.0, "R": 2.0, "B": 4.0, "S": 0.0}
    return lambda use: products[use.kind] * parameters[use.layer] * tokens / rate


@dataclass(frozen=True)
class OffloadTimes:
    """Seconds of an offload plan on a device and a link that work concurrently."""

    makespan: float
    compute: float
    transfer: float
    waited: tuple[float, ...]
    """Seconds that the device waits for the layer of each use."""


def simulate_offload(
    plan: OffloadPlan,
    seconds: Callable[[Use], float],
    storages: Mapping[int, Mapping[str, int]],
    bandwidth: float,
    latency: float = 0.0,
) -> OffloadTimes:
    """Simulate an offload plan on one device and one link, which copies one layer at a time.

    A copy starts when the link is free and the previous use, whose memory it may take, has ended.

    Args:
        plan: result of plan_offload.
        seconds: function that returns the seconds of a use.
        storages: bytes of each layer's storages, as in plan_offload.
        bandwidth: bandwidth of the link, bytes per second.
        latency: seconds before each copy.
    """
    now = 0.0
    link_free = 0.0
    compute = 0.0
    transfer = 0.0
    ready: dict[int, float] = {}
    changed: set[int] = set()
    waited = []

    def copy(layer: int) -> float:
        nonlocal link_free, transfer
        duration = latency + sum(storages[layer].values()) / bandwidth
        link_free = max(link_free, now) + duration
        transfer += duration
        return link_free

    for step in plan.moves:
        for layer in step.fetches:
            ready[layer] = copy(layer)
        waited.append(max(0.0, ready.get(step.use.layer, 0.0) - now))
        now += waited[-1] + seconds(step.use)
        compute += seconds(step.use)
        if step.use.kind == "S":
            changed.add(step.use.layer)
        for layer in changed.intersection(step.evictions):
            now = copy(layer)  # the next layer takes its memory
            changed.remove(layer)
    return OffloadTimes(now, compute, transfer, tuple(waited))
