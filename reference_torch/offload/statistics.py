"""What offload has moved and waited for."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class OffloadStatistics:
    """Counts since the manager was made."""

    bytes_in: int = 0
    """Copied from host to device."""
    bytes_out: int = 0
    """Copied from device to host."""
    copies_in: int = 0
    copies_out: int = 0
    hits: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Uses of each layer that was there, or on its way."""
    misses: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Uses that had to ask for their layer and wait for all of it."""
    peak_bytes: int = 0
    """Most bytes that registered layers took on the device at once, since they were first let go."""
    peak_layers: int = 0
    _waited: float = 0.0
    _events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    @property
    def seconds_waited(self) -> float:
        """Time the computation has waited for copies to the device."""
        for begin, end in self._events:
            end.synchronize()
            self._waited += begin.elapsed_time(end) / 1000.0
        self._events = []
        return self._waited

    def as_dict(self) -> dict[str, Any]:
        """Everything, for a report."""
        return {
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
            "copies_in": self.copies_in,
            "copies_out": self.copies_out,
            "hits": sum(self.hits.values()),
            "misses": sum(self.misses.values()),
            "misses_by_layer": {str(layer): count for layer, count in sorted(self.misses.items())},
            "seconds_waited": self.seconds_waited,
            "peak_bytes": self.peak_bytes,
            "peak_layers": self.peak_layers,
        }

    def note_copies(self, direction: str, moved: Sequence[int]) -> None:
        """Bytes of copies that have been asked for; 0 is none."""
        count, size = sum(nbytes > 0 for nbytes in moved), sum(moved)
        if direction == "in":
            self.copies_in, self.bytes_in = self.copies_in + count, self.bytes_in + size
        else:
            self.copies_out, self.bytes_out = self.copies_out + count, self.bytes_out + size

    def note_use(self, layer_id: int, hit: bool) -> None:
        """A layer is used; whether it was there or on its way."""
        (self.hits if hit else self.misses)[layer_id] += 1

    def note_bytes(self, nbytes: int, layers: int) -> None:
        """What is on the device now."""
        self.peak_bytes, self.peak_layers = max(self.peak_bytes, nbytes), max(self.peak_layers, layers)

    def restart_peak(self, nbytes: int, layers: int) -> None:
        """Forget what was on the device before now."""
        self.peak_bytes, self.peak_layers = nbytes, layers

    @contextlib.contextmanager
    def waiting(self, device: torch.device) -> Iterator[None]:
        """Count the time inside: of this thread, or on a GPU, of its current stream."""
        if device.type != "cuda":
            begin = time.perf_counter()
            yield
            self._waited += time.perf_counter() - begin
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        yield
        last.record()
        self._events.append((first, last))
        if len(self._events) > 1000:
            _ = self.seconds_waited
