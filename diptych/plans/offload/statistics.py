"""What offload has moved: of several processes together, and as a table of text."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

_OF_ONE = ("peak_bytes", "peak_layers", "seconds_waited")
"""What is not added up: processes have devices of their own, and wait at the same time."""


def total_statistics(ranks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Statistics of several processes as one: moves added up; the highest peak, the longest wait.

    Args:
        ranks: of each process, as describe_statistics takes them.
    """
    total = dict(ranks[0])
    for stats in ranks[1:]:
        for name, value in stats.items():
            if name in _OF_ONE:
                total[name] = max(total[name], value)
            elif name == "misses_by_layer":
                total[name] = dict(sorted((Counter(total[name]) + Counter(value)).items()))
            elif name == "kept":
                total[name] = total[name] | value
            else:
                total[name] += value
    return total


def describe_statistics(stats: Mapping[str, Any]) -> str:
    """Return what has been moved, as a table of text.

    Args:
        stats: ``copies_in``, ``copies_out``, ``bytes_in``, ``bytes_out``, ``hits``, ``misses``, ``peak_layers``,
            ``peak_bytes``; ``seconds_waited`` where it was measured; ``kept``, what cannot leave and why, by name.
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
            *(f"stays on the device: {name} ({reason})" for name, reason in stats.get("kept", {}).items()),
        ]
    )
