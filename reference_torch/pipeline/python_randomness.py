"""Random numbers of Python and NumPy: draws in a forward, which no torch function shows."""

import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

import numpy as np
from torch import nn

from reference_torch.pipeline.global_values import reached_by
from reference_torch.pipeline.nested_values import contents

_SOURCES = (random.Random, np.random.RandomState, np.random.Generator)
_QUIET = ("getstate", "setstate", "get_state", "set_state")


class PythonRandomness:
    """A context that notes draws of this thread, and at its end restores the states of the sources.

    Draws from the global sources are noted by wrappers of the functions of ``random`` and ``numpy.random``. Functions
    that were imported earlier by name are noted by the state of their source. Where others may draw from it too (other
    threads, and beartype, which checks an item of a list that it draws), such a draw only makes this unsure.

    Args:
        modules: modules whose attributes and methods may have sources of their own.
        is_exact: True to know draws from ``random`` by a profile function, which is slow, and never to be unsure.
    """

    def __init__(self, modules: Iterable[nn.Module], is_exact: bool = False) -> None:
        self._owned = [*_sources(modules)]
        self._is_exact = is_exact
        self._is_alone = threading.active_count() == 1 and "beartype" not in sys.modules
        self._thread = threading.get_ident()
        self._is_drawn = False
        self._wrapped: list[tuple[Any, str, Any]] = []
        self.is_unsure = False
        """True if a draw may have been that of another thread or of beartype."""

    def __enter__(self) -> None:
        self._before = [(_setter(source), state) for source in self._owned for state in [_state(source)]]
        self._before += [(random.setstate, random.getstate()), (np.random.set_state, np.random.get_state())]
        for module in (random, np.random):
            for name, function in [*vars(module).items()]:
                if isinstance(getattr(function, "__self__", None), _SOURCES) and name not in _QUIET:
                    self._wrapped.append((module, name, function))
                    setattr(module, name, self._noting(function))
        self._profile = sys.getprofile()
        if self._is_exact:
            sys.setprofile(self._note_call)
        self.note()

    def __exit__(self, *exception: object) -> None:
        if self._is_exact:
            _profile_again(self._profile)
        for module, name, function in self._wrapped:
            setattr(module, name, function)
        for put_back, state in self._before:
            put_back(state)

    def is_drawn(self) -> bool:
        """Return True if a number was surely drawn since the last ``note``."""
        owned, shared = self._read()
        is_drawn = self._is_drawn or owned != self._owned_states
        if not is_drawn and shared != self._shared_states:
            is_drawn = self._is_alone or self._is_exact
            self.is_unsure |= not is_drawn
        return is_drawn

    @property
    def has_other_threads(self) -> bool:
        """True if another thread runs, whose draws from NumPy look like those of functions imported by name."""
        return threading.active_count() > 1

    def note(self) -> None:
        """Forget the draws until now."""
        self._is_drawn = False
        self._owned_states, self._shared_states = self._read()

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of a global source that notes its calls."""

        @wraps(function)
        def draw(*args: Any, **kwargs: Any) -> Any:
            self._is_drawn |= threading.get_ident() == self._thread
            return function(*args, **kwargs)

        return draw

    def _note_call(self, frame: Any, event: str, called: Any) -> None:
        """Note a call of a C function."""
        if event == "c_call" and getattr(called, "__self__", None) is _PYTHON and called.__name__ not in _QUIET:
            self._is_drawn |= "beartype" not in frame.f_code.co_filename

    def _read(self) -> tuple[list[Any], list[Any]]:
        """Return the states of the sources of the model, and of those that all share."""
        owned = [_comparable(_state(source)) for source in self._owned]
        shared = [_comparable(np.random.get_state())]
        return owned, shared if self._is_exact else [*shared, random.getstate()]


_PYTHON = random.random.__self__  # pyright: ignore[reportFunctionMemberAccess]
_NUMPY = np.random.random.__self__  # pyright: ignore[reportFunctionMemberAccess]


def _profile_again(profile: Any) -> None:
    """Restore what ``sys.getprofile`` returned: a function, None, or a profiler in C such as cProfile's."""
    if profile is None or callable(profile):
        sys.setprofile(profile)
    else:
        sys.setprofile(None)
        profile.enable()


def _sources(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yield sources in attributes of modules, and those that their methods reach by global names and closures."""
    seen = {id(_PYTHON), id(_NUMPY)}
    modules = [*modules]
    attributes = [value for module in modules for name, value in vars(module).items() if name not in _REGISTRIES]
    for value in [*contents(attributes).values(), *reached_by(modules)]:
        if isinstance(value, _SOURCES) and not isinstance(value, random.SystemRandom) and id(value) not in seen:
            seen.add(id(value))
            yield value


_REGISTRIES = ("_modules", "_parameters", "_buffers")


def _state(source: Any) -> Any:
    """Return the state of a source of random numbers."""
    if isinstance(source, np.random.Generator):
        return source.bit_generator.state
    return source.getstate() if isinstance(source, random.Random) else source.get_state()


def _setter(source: Any) -> Callable[[Any], Any]:
    """Return a function that sets the state of a source."""
    if isinstance(source, np.random.Generator):
        return lambda state: setattr(source.bit_generator, "state", state)
    return source.setstate if isinstance(source, random.Random) else source.set_state


def _comparable(state: Any) -> Any:
    """Return a state with bytes in place of arrays, which == compares."""
    if isinstance(state, np.ndarray):
        return state.tobytes()
    if isinstance(state, dict):
        return {name: _comparable(value) for name, value in state.items()}
    return tuple(map(_comparable, state)) if isinstance(state, tuple) and len(state) < 20 else state
