"""Helpers for custom gradients. Mirrors ``reference_torch/autograd.py``."""

from collections.abc import Callable
from typing import Any

import jax


def differentiable_once(what: str, setting: str, static: tuple[int, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator for a function of a backward pass that cannot be differentiated itself.

    Its derivative raises a RuntimeError, because second derivatives would be incomplete.

    Args:
        what: name with which the error message begins.
        setting: setting to leave out for second derivatives.
        static: indices of the arguments that are not arrays.
    """

    def wrap(function: Callable[..., Any]) -> Any:
        once = jax.custom_jvp(function, nondiff_argnums=static)

        @once.defjvp
        def refuse(*_: Any) -> Any:
            raise RuntimeError(
                f"{what}: expected to be differentiated once, got a derivative of its gradient; leave {setting} out"
            )

        return once

    return wrap
