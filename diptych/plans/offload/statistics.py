"""Offload statistics: of a plan, sums over processes, and a text table."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diptych.plans.offload.moves import OffloadPlan

_OF_ONE = ("peak_bytes", "peak_layers", "seconds_waited")
"""Statistics combined by maximum, because processes have separate devices and wait concurrently."""


@dataclass
class MoveCounter:
    """A counter of activations that move to the host and back; it counts while a program is traced."""

    arrays: int = 0
    bytes: int = 0

    def note(self, nbytes: int) -> None:
        """Count one array of ``nbytes`` bytes."""
        self.arrays += 1
        self.bytes += nbytes

    def times(self, count: int) -> "MoveCounter":
        """Return the counter multiplied by ``count``."""
        return MoveCounter(self.arrays * count, self.bytes * count)


def plan_statistics(
    plans: Sequence[OffloadPlan], arrays: Mapping[Any, int], activations: MoveCounter, steps_run: int
) -> dict[str, Any]:
    """Return the statistics of steps, computed from their plans.

    The time that a step waits for copies is unknown in a compiled program. See describe_statistics for the keys.

    Args:
        plans: plan of one step for every device.
        arrays: number of arrays of each layer.
        activations: activations moved in one step.
        steps_run: number of steps.
    """
    misses = Counter()
    copies = Counter()
    peak_layers = 0
    for plan in plans:
        on_device = 0
        for moves in plan.moves:
            peak_layers = max(peak_layers, on_device := on_device + len(moves.fetches))
            on_device -= len(moves.evictions)
            copies["in"] += sum(arrays[layer] for layer in moves.fetches)
            copies["out"] += arrays[moves.use.layer] if moves.use.kind == "S" else 0
        for place in plan.misses:
            misses[str(plan.moves[place].use.layer)] += steps_run
    uses = sum(len(plan.moves) for plan in plans)
    return {
        "bytes_in": (sum(plan.bytes_in for plan in plans) + activations.bytes) * steps_run,
        "bytes_out": (sum(plan.bytes_out for plan in plans) + activations.bytes) * steps_run,
        "copies_in": (copies["in"] + activations.arrays) * steps_run,
        "copies_out": (copies["out"] + activations.arrays) * steps_run,
        "hits": uses * steps_run - misses.total(),
        "misses": misses.total(),
        "misses_by_layer": dict(sorted(misses.items())),
        "peak_bytes": max(plan.peak_bytes for plan in plans),
        "peak_layers": peak_layers,
    }


def total_statistics(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine the statistics of several processes: sums of moves, maxima of peaks and waits.

    Args:
        ranks: statistics of each process, in the form that describe_statistics takes.
    """
    total = dict(ranks[0])
    for stats in ranks[1:]:
        for name, value in stats.items():
            if name in _OF_ONE:
                total[name] = max(total[name], value)
            elif name == "misses_by_layer":
                total[name] = dict(sorted((Counter(total[name]) + Counter(value)).items()))
            elif name == "retained":
                total[name] = total[name] | value
            else:
                total[name] += value
    return total


def describe_statistics(stats: Mapping[str, Any]) -> str:
    """Return offload statistics as a text table.

    Args:
        stats: ``copies_in``, ``copies_out``, ``bytes_in``, ``bytes_out``, ``hits``, ``misses``, ``peak_layers``,
            ``peak_bytes``; ``seconds_waited`` if measured; ``retained``, the reasons why parameters stay, by name.
    """
    mib = {name: f"{stats[name] / 2**20:,.1f}" for name in ("bytes_in", "bytes_out", "peak_bytes")}
    uses = stats["hits"] + stats["misses"]
    waited = stats.get("seconds_waited")
    return "\n".join(
        [
            f"{'offload':10}{'to device':>14}{'to host':>14}",
            f"{'copies':10}{stats['copies_in']:>14,}{stats['copies_out']:>14,}",
            f"{'MiB':10}{mib['bytes_in']:>14}{mib['bytes_out']:>14}",
            f"{stats['misses']:,} of {uses:,} uses of a layer began before its copy was requested",
            f"at most {stats['peak_layers']} layers, {mib['peak_bytes']} MiB of them on the device"
            + ("" if waited is None else f"; waited {waited:.3f} s for copies"),
            *(f"stays on the device: {name} ({reason})" for name, reason in stats.get("retained", {}).items()),
        ]
    )
