"""State that a replay must restore: random generators, autocast and CUDA streams.

The generators include the default ones of Python and NumPy, because stochastic depth often draws from them.
"""

import contextlib
import ctypes
import random
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator  # pyright: ignore[reportAttributeAccessIssue]
from torch import Tensor

_generators_lock = threading.RLock()
"""Lock held while a replay draws random numbers, because the process shares the default generators."""


class ReplayState:
    """A snapshot of the state before a call.

    Args:
        inputs: tensors of the call; the snapshot covers their devices.
        generators: random generators that the call draws from, besides the default generators.
    """

    def __init__(self, inputs: Sequence[Tensor], generators: Sequence[torch.Generator]) -> None:
        devices = {tensor.device for tensor in inputs}
        self._cuda = sorted({d.index for d in devices if d.type == "cuda"} | _current_cuda_device())
        drawn_from = [_default_generator(index) for index in [None, *self._cuda]] + list(generators)
        self._states: dict[torch.Generator, Tensor] = {g: g.get_state() for g in drawn_from}
        self._python: tuple | None = random.getstate()
        self._numpy: NumpyState | None = NumpyState()
        types = sorted({"cpu"} | {device.type for device in devices})
        self._autocast = [(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types]
        self._cache_enabled = torch.is_autocast_cache_enabled()
        self._streams = {index: torch.cuda.current_stream(index) for index in self._cuda}

    def note_draw(self, generator: torch.Generator) -> None:
        """Record the state of a generator before the call draws from it for the first time."""
        if generator not in self._states:
            self._states[generator] = generator.get_state()

    def forget_unused(self) -> None:
        """Drop, after the call, the state of generators that it did not draw from."""
        self._states = {g: state for g, state in self._states.items() if not torch.equal(state, g.get_state())}
        if self._python is not None and _drawn_by_python(self._python) == _drawn_by_python(random.getstate()):
            self._python = None
        if self._numpy is not None and self._numpy.is_current():
            self._numpy = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Restore the snapshot in this context, and the previous state afterwards or on an error."""
        with contextlib.ExitStack() as stack:
            if self._states or self._python or self._numpy:  # another thread's replay would draw from the same ones
                stack.enter_context(_generators_lock)
            for generator, state in self._states.items():
                stack.callback(generator.set_state, generator.get_state())
                generator.set_state(state)
            if self._python is not None:
                stack.callback(random.setstate, random.getstate())
                random.setstate(self._python)
            if self._numpy is not None:
                stack.callback(np.random.set_state, np.random.get_state(legacy=False))
                np.random.set_state(self._numpy.state)
            for device, enabled, dtype in self._autocast:
                stack.enter_context(torch.autocast(device, dtype, enabled, self._cache_enabled))
            for index, stream in self._streams.items():
                self._enter_stream(stack, index, stream)
            yield

    def _enter_stream(self, stack: contextlib.ExitStack, index: int, stream: torch.cuda.Stream) -> None:
        """Enter the stream of the forward, and order it after and before the work of the current stream."""
        current = torch.cuda.current_stream(index)
        if current == stream:
            return
        stream.wait_stream(current)
        stack.callback(current.wait_stream, stream)
        stack.enter_context(torch.cuda.stream(stream))

    def record_event(self, device: torch.device) -> torch.Event | None:
        """Return an event after the replay on its stream, or None on the CPU."""
        if device.type != "cuda":
            return None
        return self._streams[device.index].record_event()


def _drawn_by_python(state: tuple) -> tuple:
    """Return the parts of a state of Python's generator that change with every draw."""
    _, words, gauss = state
    return words[-1], words[0], words[1], gauss


class NumpyState:
    """A snapshot of the state of NumPy's default generator."""

    def __init__(self) -> None:
        self._memory = _numpy_memory()
        self.state: dict = np.random.get_state(legacy=False)

    def is_current(self) -> bool:
        """Return True if the generator has drawn nothing since."""
        if self._memory != _numpy_memory():
            return False
        if self._memory and not self.state["has_gauss"]:
            return True
        # A second normal number, which the generator holds, is drawn without a change of its memory.
        state = np.random.get_state(legacy=False)
        inner = state["state"]
        is_same = all(np.array_equal(inner[key], self.state["state"][key]) for key in inner)
        return is_same and state["has_gauss"] == self.state["has_gauss"]


def _numpy_memory() -> bytes:
    """Return the words and the position of NumPy's default kind of generator; empty for other kinds."""
    generator = get_bit_generator()
    if not isinstance(generator, np.random.MT19937):
        return b""
    return ctypes.string_at(generator.ctypes.state_address, _BYTES_OF_MT19937)


_BYTES_OF_MT19937 = 625 * 4
"""624 words and a position."""


def _default_generator(cuda_index: int | None) -> torch.Generator:
    """Return PyTorch's default generator of a CUDA device, or of the CPU if the index is None."""
    return torch.default_generator if cuda_index is None else torch.cuda.default_generators[cuda_index]


def _current_cuda_device() -> set[int]:
    """Return the index of the current CUDA device; empty if CUDA is not in use."""
    return {torch.cuda.current_device()} if torch.cuda.is_initialized() else set()
