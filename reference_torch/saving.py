"""Conversion between a model with its optimizer and the named numpy arrays of a checkpoint.

The canonical name of a parameter is its name in the module tree. It is the same in both backends, so a checkpoint needs
no renaming. diptych/plans/checkpoint.py reads and writes the files.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from diptych.plans.checkpoint import FIRST_MOMENT, MODEL, SECOND_MOMENT, read_checkpoint, recorded_model, split_arrays
from diptych.plans.model.parameters import ParameterSpec, check_values
from reference_torch.autograd import gradient_dtype
from reference_torch.distributed_optimizer import DistributedAdamW
from reference_torch.offload import host_value
from reference_torch.transformer import GPTModel

_STATE = {"exp_avg": "first moment", "exp_avg_sq": "second moment", "master_weight": "master weight"}
"""Names of the optimizer's state of a parameter in PyTorch and in error messages."""

Model = nn.Module | Sequence[nn.Module]
"""A model, or its pipeline stages that are placed on this process."""


def export_parameters(model: Model, optimizer: torch.optim.Optimizer | None = None) -> dict[str, np.ndarray]:
    """Return a copy of every parameter, by canonical name.

    Args:
        model: the model.
        optimizer: the optimizer of its parameters, whose master weights are returned if it has some; all of its ranks
            then call this function.
    """
    return {name: _array(_exact(parameter, optimizer)) for name, parameter in _named_parameters(model)}


def import_parameters(
    model: Model, values: Mapping[str, np.ndarray], optimizer: torch.optim.Optimizer | None = None
) -> Model:
    """Overwrite every parameter, in place.

    Args:
        model: model to overwrite.
        values: new values, by canonical name.
        optimizer: the optimizer of its parameters, whose master weights are overwritten too.

    Returns:
        The model.

    Raises:
        ValueError: names or shapes differ from those of the model; nothing is changed.
    """
    check_values(values, _specs(model))
    with torch.no_grad():
        for name, parameter in _named_parameters(model):
            value = torch.from_numpy(values[name])
            host_value(parameter).copy_(value)
            if isinstance(optimizer, DistributedAdamW):
                optimizer.set_master_weight(parameter, value.contiguous())
    return model


def export_arrays(model: Model, optimizer: torch.optim.Optimizer) -> dict[str, np.ndarray]:
    """Return parameters and both moments of AdamW, by prefixed canonical name; moments are 0 before the first step.

    With a DistributedAdamW, all of its ranks call this function, and each receives unsharded moments.
    """
    arrays = {}
    for name, parameter in _named_parameters(model):
        arrays[MODEL + name] = _array(_exact(parameter, optimizer))
        for prefix, key in ((FIRST_MOMENT, "exp_avg"), (SECOND_MOMENT, "exp_avg_sq")):
            moment = optimizer.state.get(parameter, {}).get(key)
            if isinstance(optimizer, DistributedAdamW):
                moment = optimizer.unshard(moment, parameter)
            arrays[prefix + name] = _array(torch.zeros_like(parameter) if moment is None else moment)
    return arrays


def import_arrays(
    model: Model, optimizer: torch.optim.Optimizer, arrays: Mapping[str, np.ndarray], step: int
) -> tuple[Model, torch.optim.Optimizer]:
    """Overwrite model and optimizer with exported arrays, in place.

    Args:
        model: model to overwrite.
        optimizer: optimizer to overwrite.
        arrays: from export_arrays of either backend.
        step: number of optimizer steps taken.

    Returns:
        model, optimizer.

    Raises:
        ValueError: names or shapes differ from those of the model; nothing is changed.
    """
    specs = _specs(model)
    first, second = (split_arrays(arrays, prefix) for prefix in (FIRST_MOMENT, SECOND_MOMENT))
    check_values(first, specs)
    check_values(second, specs)
    import_parameters(model, split_arrays(arrays, MODEL), optimizer)
    for name, parameter in _named_parameters(model):
        # torch.tensor always copies: the optimizer updates moments in place, and two stages of one process can have a
        # parameter of the same name, a tied embedding.
        state = {
            key: torch.tensor(values[name], device=parameter.device, dtype=gradient_dtype(parameter))
            for key, values in (("exp_avg", first), ("exp_avg_sq", second))
        }
        if isinstance(optimizer, DistributedAdamW):
            state = {key: optimizer.own_shard(moment).clone() for key, moment in state.items()}
        optimizer.state[parameter] |= {"step": torch.tensor(float(step), device=parameter.device), **state}
    _check_own_memory(model, optimizer)
    return model, optimizer


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
    model = GPTModel(replace(config, seq_length=seq_length or config.seq_length))
    import_parameters(model, split_arrays(checkpoint.arrays, MODEL))
    return model


def _named_parameters(model: Model) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of all stages with their canonical names."""
    for part in [model] if isinstance(model, nn.Module) else model:
        yield from part.named_parameters()


def _exact(parameter: nn.Parameter, optimizer: torch.optim.Optimizer | None) -> Tensor:
    """Return a parameter, or the master weights of which it is a rounded copy."""
    if isinstance(optimizer, DistributedAdamW) and (master := optimizer.master_weight(parameter)) is not None:
        return optimizer.unshard(master, parameter)
    return parameter


def _check_own_memory(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Assert that no two parameters or moments share memory, because each is updated in place once per step."""
    memories: list[tuple[str, int, int, str, str]] = []
    for name, parameter in _named_parameters(model):
        state = optimizer.state.get(parameter, {})
        tensors = {"parameter": host_value(parameter)}
        tensors |= {kind: state[key] for key, kind in _STATE.items() if key in state}
        for kind, tensor in tensors.items():
            begin = tensor.data_ptr()
            memories.append((str(tensor.device), begin, begin + tensor.nbytes, name, kind))
    memories.sort(key=lambda memory: memory[:2])  # a stable sort: at one address, the first import comes first
    for (device, _, end, first, first_kind), (own_device, begin, _, name, kind) in pairwise(memories):
        shared = device == own_device and begin < end
        assert not shared, f"{name}: its {kind} shares memory with the {first_kind} of {first}"


def _specs(model: Model) -> dict[str, ParameterSpec]:
    """Return the shapes of all parameters, by canonical name."""
    return {name: ParameterSpec(tuple(parameter.shape)) for name, parameter in _named_parameters(model)}


def _array(tensor: Tensor) -> np.ndarray:
    """Return a copy of a tensor as a numpy array, in at least float32, from the host copy if its layer is offloaded."""
    value = host_value(tensor).detach().cpu()
    return (value.float() if value.dtype is torch.bfloat16 else value).numpy().copy()
