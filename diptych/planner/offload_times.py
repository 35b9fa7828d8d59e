"""How long a plan takes on a device and a link that work at the same time, and when copies hide."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from diptych.plans.config import TransformerConfig
from diptych.plans.offload.moves import OffloadPlan, layer_storages
from diptych.plans.offload.uses import Use


def hiding_tokens(config: TransformerConfig, bandwidth: float, rate: float) -> float:
    """Tokens of a microbatch from which on a layer's copy takes no longer than its forward.

    A forward multiplies and adds once a parameter and token, a backward twice; so where copies hide behind forwards,
    they hide behind backwards.

    Args:
        bandwidth: of the link, in bytes a second.
        rate: of the device, in floating-point operations a second.
    """
    return np.dtype(config.params_dtype).itemsize * rate / (2.0 * bandwidth)


def use_seconds(config: TransformerConfig, tokens: int, rate: float) -> Callable[[Use], float]:
    """How long a use computes, by its products with weights alone.

    Args:
        tokens: of a microbatch.
        rate: of the device, in floating-point operations a second.
    """
    width = np.dtype(config.params_dtype).itemsize
    parameters = {layer: sum(sizes.values()) / width for layer, sizes in layer_storages(config).items()}
    products = {"F": 2.0, "R": 2.0, "B": 4.0, "S": 0.0}
    return lambda use: products[use.kind] * parameters[use.layer] * tokens / rate


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
