"""Tensor offload: parameters are placed in host memory until their layer is used, activations until its backward.

``diptych/plans/offload/`` decides which layers move when. Its counterpart ``reference_torch/offload`` moves layers
by hooks while the program runs. Here the plan is applied when the step is traced. The result is one program with every
copy in its place, and XLA overlaps the copies with computation:

    offload = OffloadedStep(config, params, num_microbatches=1)       the plan of a training step
    params = offload.place(params)                                    layers to pinned_host
    ...                                                               and inside the jitted step:
    (loss, gradients), on_device = offload.value_and_grad(loss_fn, params, offload.begin(params), batch)
    params, state = offload.update(update_function, params, state, gradients, on_device)

A model whose configuration enables offload runs its layers with ``run_offloaded``; if the parameters are on the device
already, the copies do nothing. In a pipeline, every action is a separate pass: ``jax_impl/pipeline/offload.py``.
"""

from jax_impl.offload.modules import OffloadedModules, offload_modules
from jax_impl.offload.residency import (
    Layers,
    Pass,
    copy_to_device,
    is_on_host,
    offloads_layers,
    without_offload,
)
from jax_impl.offload.stack import run_offloaded, single_pass
from jax_impl.offload.step import OffloadedStep, PlannedOffload
from jax_impl.offload.update import OffloadedParameters, UpdateFunction, layer_numbers

__all__ = [
    "offload_modules",
    "OffloadedModules",
    "run_offloaded",
    "offloads_layers",
    "without_offload",
    "OffloadedStep",
    "PlannedOffload",
    "OffloadedParameters",
    "UpdateFunction",
    "Pass",
    "single_pass",
    "Layers",
    "copy_to_device",
    "is_on_host",
    "layer_numbers",
]
