"""Import of modules that need PyTorch or JAX, with an error that names the missing framework and its extra."""

import importlib
from types import ModuleType

EXTRAS = {"torch": "torch", "jax": "jax", "jaxlib": "jax", "flax": "jax", "optax": "jax"}
"""Backend, and extra of this project, to which a package belongs."""


def import_with_frameworks(name: str, needed_by: str) -> ModuleType:
    """Import a module.

    Args:
        name: name of the module.
        needed_by: what needs it, for the message.

    Raises:
        ModuleNotFoundError: a framework is not installed; the message has one line and names the extra to install.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        backend = EXTRAS.get((error.name or "").partition(".")[0])
        if backend is None:
            raise
        raise ModuleNotFoundError(
            f"{needed_by}: expected an installed framework for {backend!r}, but {error.name!r} is missing; "
            f"pip install 'diptych[{backend}]'",
            name=error.name,
        ) from None
