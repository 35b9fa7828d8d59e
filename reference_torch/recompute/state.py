"""State that a replay must restore: random generators, autocast, CUDA streams, and what parameters require.

The generators include the default ones of Python and NumPy, because stochastic depth often draws from them.
"""

import contextlib
import ctypes
import random
import struct
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import RandomState, get_bit_generator  # pyright: ignore[reportAttributeAccessIssue]
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
        self._python: PythonState | None = PythonState()
        self._numpy: NumpyState | None = NumpyState()
        types = sorted({"cpu"} | {device.type for device in devices})
        self._autocast = [(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t)) for t in types]
        self._cache_enabled = torch.is_autocast_cache_enabled()
        self._streams = {index: torch.cuda.current_stream(index) for index in self._cuda}
        self._flags: list[tuple[weakref.ref[Tensor], bool]] = []

    def note_draw(self, generator: torch.Generator) -> None:
        """Record the state of a generator before the call draws from it for the first time."""
        if generator not in self._states:
            self._states[generator] = generator.get_state()

    def note_flags(self, parameters: "Iterable[weakref.ref[Tensor]]") -> None:
        """Record which parameters of the call require gradients, since a replay saves values by these flags."""
        found = [(reference, reference()) for reference in parameters]
        self._flags = [(reference, parameter.requires_grad) for reference, parameter in found if parameter is not None]

    def forget_unused(self) -> None:
        """Drop, after the call, the state of generators that it did not draw from."""
        self._states = {g: state for g, state in self._states.items() if not torch.equal(state, g.get_state())}
        if self._python is not None and self._python.is_current():
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
                random.setstate(self._python.state)
            if self._numpy is not None:
                stack.callback(np.random.set_state, np.random.get_state(legacy=False))
                np.random.set_state(self._numpy.state)
            for device, enabled, dtype in self._autocast:
                now = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
                if not enabled and now == (enabled, dtype) and self._cache_enabled == torch.is_autocast_cache_enabled():
                    continue
                stack.enter_context(torch.autocast(device, dtype, enabled, self._cache_enabled))
            stack.enter_context(self.on_streams())
            for reference, flag in self._flags:
                parameter = reference()
                if parameter is not None and parameter.requires_grad != flag:
                    stack.callback(parameter.requires_grad_, not flag)
                    parameter.requires_grad_(flag)
            yield

    @contextlib.contextmanager
    def on_streams(self) -> Iterator[None]:
        """Enter the streams of the forward, and order them after and before the work of the current streams."""
        with contextlib.ExitStack() as stack:
            for index, stream in self._streams.items():
                current = torch.cuda.current_stream(index)
                if current != stream:
                    stream.wait_stream(current)
                    stack.callback(current.wait_stream, stream)
                    stack.enter_context(torch.cuda.stream(stream))
            yield

    def record_event(self, device: torch.device) -> torch.Event | None:
        """Return an event after the replay on its stream, or None on the CPU."""
        if device.type != "cuda":
            return None
        return self._streams[device.index].record_event()


class PythonState:
    """A snapshot of the state of Python's default generator.

    random.getstate() takes longer than many operations. The memory of the generator is copied instead, where it has the
    known layout.
    """

    def __init__(self) -> None:
        self._memory = _python_memory()
        self._gauss = _PYTHON.gauss_next
        self._state = None if self._memory else random.getstate()

    @property
    def state(self) -> tuple:
        """The state, as random.setstate takes it."""
        if self._state is not None:
            return self._state
        position, *words = struct.unpack("=625I", self._memory)
        return _PYTHON.VERSION, (*words, position), self._gauss

    def is_current(self) -> bool:
        """Return True if the generator has drawn nothing since."""
        if self._state is not None:
            return self._state == random.getstate()
        return self._memory == _python_memory() and self._gauss == _PYTHON.gauss_next


class NumpyState:
    """A snapshot of the state of NumPy's default generator, taken as by PythonState."""

    def __init__(self) -> None:
        self._memory = _numpy_memory()
        self._gauss = _numpy_gauss()
        self._state = None if self._memory and self._gauss else np.random.get_state(legacy=False)

    @property
    def state(self) -> dict:
        """The state, as np.random.set_state takes it."""
        if self._state is not None:
            return self._state
        *words, position = struct.unpack("=625I", self._memory)
        has_gauss, gauss = struct.unpack(_GAUSS, self._gauss)
        inner = {"key": np.array(words, np.uint32), "pos": position}
        return {"bit_generator": "MT19937", "state": inner, "has_gauss": has_gauss, "gauss": gauss}

    def is_current(self) -> bool:
        """Return True if the generator has drawn nothing since."""
        if self._state is None:
            return self._memory == _numpy_memory() and self._gauss == _numpy_gauss()
        state = np.random.get_state(legacy=False)
        inner = state["state"]
        is_same = all(np.array_equal(inner[key], self._state["state"][key]) for key in inner)
        return is_same and state["has_gauss"] == self._state["has_gauss"]


_PYTHON: Any = random.getstate.__self__  # pyright: ignore[reportFunctionMemberAccess]
_NUMPY: RandomState = np.random.get_state.__self__  # pyright: ignore[reportAttributeAccessIssue]
_BYTES_OF_MT19937 = 625 * 4
"""624 words and a position, which is first in Python and last in NumPy."""
_GAUSS = "@id"
"""A flag, and the second normal number of a pair, which NumPy draws without a change of the words."""


def _offset_in(owner: object, content: bytes) -> int | None:
    """Return the offset of bytes in the memory of an object, or None if it has them nowhere or more than once."""
    memory = ctypes.string_at(id(owner), object.__sizeof__(owner))
    return memory.find(content) if memory.count(content) == 1 else None


def _python_offset() -> int | None:
    """Return the offset of position and words in Python's default generator, or None in an unknown layout."""
    *words, position = random.getstate()[1]
    return _offset_in(_PYTHON, struct.pack("=625I", position, *words))


def _gauss_offset() -> int | None:
    """Return the offset of the flag and the normal number in a RandomState, or None in an unknown layout."""
    generator = RandomState(0)
    generator.standard_normal()
    gauss = generator.get_state(legacy=False)["gauss"]
    place = _offset_in(generator, struct.pack("@d", gauss))
    if place is None:
        return None
    offset = place - struct.calcsize(_GAUSS) + struct.calcsize("@d")
    flags = []
    for _ in range(3):
        flags.append(ctypes.c_int.from_address(id(generator) + offset).value)
        generator.standard_normal()
    return offset if flags == [1, 0, 1] else None


_PYTHON_OFFSET = _python_offset()
_GAUSS_OFFSET = _gauss_offset()


def _python_memory() -> bytes:
    """Return the position and the words of Python's default generator; empty in an unknown layout."""
    return b"" if _PYTHON_OFFSET is None else ctypes.string_at(id(_PYTHON) + _PYTHON_OFFSET, _BYTES_OF_MT19937)


def _numpy_memory() -> bytes:
    """Return the words and the position of NumPy's default kind of generator; empty for other kinds."""
    generator = get_bit_generator()
    if not isinstance(generator, np.random.MT19937):
        return b""
    return ctypes.string_at(generator.ctypes.state_address, _BYTES_OF_MT19937)


def _numpy_gauss() -> bytes:
    """Return the flag and the normal number that NumPy's default generator holds; empty in an unknown layout."""
    return b"" if _GAUSS_OFFSET is None else ctypes.string_at(id(_NUMPY) + _GAUSS_OFFSET, struct.calcsize(_GAUSS))


def _default_generator(cuda_index: int | None) -> torch.Generator:
    """Return PyTorch's default generator of a CUDA device, or of the CPU if the index is None."""
    return torch.default_generator if cuda_index is None else torch.cuda.default_generators[cuda_index]


def _current_cuda_device() -> set[int]:
    """Return the index of the current CUDA device; empty if CUDA is not in use."""
    return {torch.cuda.current_device()} if torch.cuda.is_initialized() else set()
