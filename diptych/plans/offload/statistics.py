"""Offload statistics: sums over processes, and a text table."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_OF_ONE = ("peak_bytes", "peak_layers", "seconds_waited")
"""Statistics combined by maximum, because processes have separate devices and wait concurrently."""


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
