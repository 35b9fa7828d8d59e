"""Conversion between a model with its optimizer and the named numpy arrays of a checkpoint.

The canonical name of a parameter is its name in the module tree. It is the same in both backends, so a checkpoint needs
no renaming. diptych/plans/checkpoint.py reads and writes the files.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array

from diptych.plans.checkpoint import FIRST_MOMENT, MODEL, SECOND_MOMENT, read_checkpoint, recorded_model, split_arrays
from diptych.plans.model.parameters import ParameterSpec, check_values
from jax_impl.transformer import GPTModel


def export_parameters(model: nnx.State) -> dict[str, np.ndarray]:
    """Return a copy of every parameter, gradient or moment of a state, by canonical name."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(model)
    return {_canonical_name(path): np.array(leaf) for path, leaf in leaves}


def import_parameters(model: nnx.State, values: Mapping[str, np.ndarray]) -> nnx.State:
    """Return a state of the same structure with other values.

    Args:
        model: state that gives structure and types.
        values: new values, by canonical name.

    Returns:
        The new state.

    Raises:
        ValueError: names or shapes differ from those of the state.
    """
    check_values(values, {name: ParameterSpec(value.shape) for name, value in export_parameters(model).items()})

    def replace(path: tuple, leaf: Array) -> Array:
        # The copy is needed: a JAX array may share the memory of a numpy array, which the caller may change.
        return jnp.asarray(np.array(values[_canonical_name(path)], leaf.dtype))

    return jax.tree_util.tree_map_with_path(replace, model)


def export_arrays(model: nnx.State, optimizer: Any) -> dict[str, np.ndarray]:
    """Return parameters and both moments of AdamW, by prefixed canonical name; moments are 0 before the first step."""
    parts = {
        MODEL: model,
        FIRST_MOMENT: optax.tree_utils.tree_get(optimizer, "mu"),
        SECOND_MOMENT: optax.tree_utils.tree_get(optimizer, "nu"),
    }
    return {prefix + name: value for prefix, part in parts.items() for name, value in export_parameters(part).items()}


def import_arrays(
    model: nnx.State, optimizer: Any, arrays: Mapping[str, np.ndarray], step: int
) -> tuple[nnx.State, Any]:
    """Return states of model and optimizer with the values of exported arrays.

    Args:
        model: state that gives structure and types.
        optimizer: state that gives structure and types.
        arrays: from export_arrays of either backend.
        step: number of optimizer steps taken.

    Returns:
        New model and optimizer states.

    Raises:
        ValueError: names or shapes differ from those of the model.
    """
    first, second = (import_parameters(model, split_arrays(arrays, prefix)) for prefix in (FIRST_MOMENT, SECOND_MOMENT))
    optimizer = optax.tree_utils.tree_set(optimizer, mu=first, nu=second, count=jnp.asarray(step, jnp.int32))
    return import_parameters(model, split_arrays(arrays, MODEL)), optimizer


def load_model(path: Path | str, seq_length: int | None = None) -> GPTModel:
    """Return the model of a checkpoint of either backend.

    Args:
        path: a checkpoint file, or a folder whose newest checkpoint is read.
        seq_length: maximum sequence length of the model; None: the recorded one.

    Raises:
        CheckpointError: see diptych.plans.checkpoint.read_checkpoint.
    """
    checkpoint = read_checkpoint(path)
    config = recorded_model(checkpoint.settings)
    graph, params = nnx.split(GPTModel(replace(config, seq_length=seq_length or config.seq_length)), nnx.Param)
    return nnx.merge(graph, import_parameters(params, split_arrays(checkpoint.arrays, MODEL)))


def _canonical_name(path: tuple) -> str:
    """Return the canonical name of a leaf: the keys of its path that name modules or parameters."""
    return ".".join(str(entry.key) for entry in path if isinstance(entry, jax.tree_util.DictKey))
