"""Random numbers of Python and NumPy: draws in a forward, which no torch function shows."""

import random
import sys
import threading
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import numpy as np
from torch import nn

_SOURCES = (random.Random, np.random.RandomState, np.random.Generator)
_QUIET = ("getstate", "setstate", "get_state", "set_state")


class PythonRandomness:
    """A context that notes draws of this thread, and at its end puts the global sources back to where they were.

    Draws from the global sources are noted by wrappers of the functions of ``random`` and ``numpy.random``. Functions
    that were imported earlier by name are noted by the state of their source, unless others may draw from it: other
    threads, and beartype, which checks an item of a list that it draws.

    Args:
        modules: modules whose attributes may be sources too.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        owned = [value for module in modules for value in vars(module).values() if isinstance(value, _SOURCES)]
        self._owned = {id(source): source for source in owned}.values()
        self._is_alone = threading.active_count() == 1 and "beartype" not in sys.modules
        self._thread = threading.get_ident()
        self._is_drawn = False
        self._wrapped: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> None:
        self._before = random.getstate(), np.random.get_state()
        for module in (random, np.random):
            for name, function in [*vars(module).items()]:
                if isinstance(getattr(function, "__self__", None), _SOURCES) and name not in _QUIET:
                    self._wrapped.append((module, name, function))
                    setattr(module, name, self._noting(function))
        self.note()

    def __exit__(self, *exception: object) -> None:
        for module, name, function in self._wrapped:
            setattr(module, name, function)
        random.setstate(self._before[0])
        np.random.set_state(self._before[1])

    def is_drawn(self) -> bool:
        """Return True if a number was drawn since the last ``note``."""
        return self._is_drawn or self._read() != self._states

    def note(self) -> None:
        """Forget the draws until now."""
        self._is_drawn = False
        self._states = self._read()

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of a global source that notes its calls."""

        @wraps(function)
        def draw(*args: Any, **kwargs: Any) -> Any:
            self._is_drawn |= threading.get_ident() == self._thread
            return function(*args, **kwargs)

        return draw

    def _read(self) -> list[Any]:
        states = [*map(_state, self._owned)]
        return [*states, random.getstate(), _comparable(np.random.get_state())] if self._is_alone else states


def _state(source: Any) -> Any:
    """Return the state of a source of random numbers, in a form that == compares."""
    if isinstance(source, random.Random):
        return source.getstate()
    is_old = isinstance(source, np.random.RandomState)
    return _comparable(source.get_state() if is_old else source.bit_generator.state)


def _comparable(state: Any) -> Any:
    """Return a state with bytes in place of arrays."""
    if isinstance(state, np.ndarray):
        return state.tobytes()
    if isinstance(state, dict):
        return {name: _comparable(value) for name, value in state.items()}
    return tuple(map(_comparable, state)) if isinstance(state, tuple) else state
