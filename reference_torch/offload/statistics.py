"""Counters of the copies of offload and of the time spent waiting for them."""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class OffloadStatistics:
    """Counters since the manager was created."""

    bytes_in: int = 0
    """Bytes copied from host to device."""
    bytes_out: int = 0
    """Bytes copied from device to host."""
    copies_in: int = 0
    copies_out: int = 0
    hits: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Uses of each layer that was on the device or being copied to it."""
    misses: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    """Uses of each layer that was on the host."""
    peak_bytes: int = 0
    """Largest number of bytes of registered layers on the device at once, since the last offload_all_layers."""
    peak_layers: int = 0
    """Largest number of registered layers on the device at once, since the last offload_all_layers."""
    _waited: float = 0.0
    _events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)

    @property
    def seconds_waited(self) -> float:
        """Seconds that the computation has waited for copies to the device."""
        for _, end in self._events:
            end.synchronize()
        self._add_finished_events()
        return self._waited

    def as_dict(self) -> dict[str, Any]:
        """Return all counters, for a report."""
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
        """Count copies.

        Args:
            direction: "in" for copies to the device, "out" for copies to the host.
            moved: bytes of each copy; 0 means no copy.
        """
        count = sum(nbytes > 0 for nbytes in moved)
        size = sum(moved)
        if direction == "in":
            self.copies_in += count
            self.bytes_in += size
        else:
            self.copies_out += count
            self.bytes_out += size

    def note_use(self, layer_id: int, hit: bool) -> None:
        """Count a use of a layer.

        Args:
            layer_id: number of the layer.
            hit: True if the layer was on the device or being copied to it.
        """
        (self.hits if hit else self.misses)[layer_id] += 1

    def note_bytes(self, nbytes: int, layers: int) -> None:
        """Update the peaks with the bytes and the number of layers on the device now."""
        self.peak_bytes = max(self.peak_bytes, nbytes)
        self.peak_layers = max(self.peak_layers, layers)

    def restart_peak(self, nbytes: int, layers: int) -> None:
        """Restart the peaks with the bytes and the number of layers on the device now."""
        self.peak_bytes = nbytes
        self.peak_layers = layers

    @contextlib.contextmanager
    def measure_wait(self, device: torch.device) -> Iterator[None]:
        """Measure the time in this context, of this thread or, on a GPU, of its current stream."""
        if device.type != "cuda":
            begin = time.perf_counter()
            yield
            self._waited += time.perf_counter() - begin
            return
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream = torch.cuda.current_stream(device)
        first.record(stream)
        yield
        last.record(stream)
        self._events.append((first, last))
        if len(self._events) > 1000:
            self._add_finished_events()

    def _add_finished_events(self) -> None:
        """Add the waits that have ended on the GPU to the seconds, without waiting for the others."""
        running = []
        for begin, end in self._events:
            if end.query():  # once, because it may end in between
                self._waited += begin.elapsed_time(end) / 1000.0
            else:
                running.append((begin, end))
        self._events = running
