"""The state around a call that its replay must find again: random generators, autocast, CUDA stream."""

import contextlib
import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

_generators_lock = threading.RLock()
"""Held while a replay draws random numbers: the default generators belong to the whole process."""


class ReplayState:
    """A snapshot, taken before a call.

    Args:
        inputs: the call's tensors; their devices are the ones whose state matters.
        generators: random generators of the caller's own that the call draws from.
    """

    def __init__(self, inputs: Sequence[Tensor], generators: Sequence[torch.Generator]) -> None:
        devices = {tensor.device for tensor in inputs}
        self._cuda = sorted({d.index for d in devices if d.type == "cuda"} | _current_cuda_device())
        drawn_from = [_default_generator(index) for index in [None, *self._cuda]] + list(generators)
        self._states: dict[torch.Generator, Tensor] = {g: g.get_state() for g in drawn_from}
        types = sorted({"cpu"} | {device.type for device in devices})
        self._autocast = [(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types]
        self._cache_enabled = torch.is_autocast_cache_enabled()
        self._streams = {index: torch.cuda.current_stream(index) for index in self._cuda}

    def forget_unused(self) -> None:
        """After the call: drop the state of generators it did not draw from."""
        self._states = {g: state for g, state in self._states.items() if not torch.equal(state, g.get_state())}

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Everything as before the call; afterwards, or if the body raises, as it was found."""
        with contextlib.ExitStack() as stack:
            if self._states:  # another thread's replay would draw from the same generators
                stack.enter_context(_generators_lock)
            for generator, state in self._states.items():
                stack.callback(generator.set_state, generator.get_state())
                generator.set_state(state)
            for device, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled, self._cache_enabled))
            for index, stream in self._streams.items():
                self._enter_stream(stack, index, stream)
            yield

    def _enter_stream(self, stack: contextlib.ExitStack, index: int, stream: torch.cuda.Stream) -> None:
        """Replay on the stream of the forward, after what this one has queued; this one waits for the replay."""
        current = torch.cuda.current_stream(index)
        if current == stream:
            return
        stream.wait_stream(current)
        stack.callback(current.wait_stream, stream)
        stack.enter_context(torch.cuda.stream(stream))

    def record_event(self, device: torch.device) -> torch.Event | None:
        """An event after the replay on its stream; None on the CPU."""
        if device.type != "cuda":
            return None
        return self._streams[device.index].record_event()


def _default_generator(cuda_index: int | None) -> torch.Generator:
    return torch.default_generator if cuda_index is None else torch.cuda.default_generators[cuda_index]


def _current_cuda_device() -> set[int]:
    return {torch.cuda.current_device()} if torch.cuda.is_initialized() else set()
