"""Tensor offload: parameters that lie in host memory until their layer is used, and activations until its backward.

What moves when is decided in ``diptych/plans/offload/``; twin of ``reference_torch/offload``, which follows hooks
while the program runs. Here the plan is walked when the step is traced, so what comes out is one program with every
copy in its place, and XLA runs the copies beside the computation:

    offload = OffloadedStep(config, params, num_microbatches=1)       what the plan says of a training step
    params = offload.place(params)                                    layers to pinned_host
    ...                                                               and inside the jitted step:
    (loss, gradients), here = offload.value_and_grad(loss_fn, params, offload.begin(params), batch)
    params, state = offload.update(change, params, state, gradients, here)

A model whose configuration enables offload calls ``run_offloaded`` where it would run its layers one by one; with
parameters that are on the device already, its moves do nothing. In a pipeline every action is a pass of its own:
``jax_impl/pipeline/offload.py``.
"""

from jax_impl.offload.device import Layers, Moved, Pass, fetched, is_on_host, offloads_layers, without_offload
from jax_impl.offload.moves import Move, branch_moves, layer_numbers, moves_of
from jax_impl.offload.stack import lone_pass, run_offloaded
from jax_impl.offload.step import OffloadedStep, plan_statistics
from jax_impl.offload.update import Change, OffloadedParameters

__all__ = [
    "run_offloaded",
    "offloads_layers",
    "without_offload",
    "OffloadedStep",
    "OffloadedParameters",
    "Change",
    "Pass",
    "lone_pass",
    "Layers",
    "Moved",
    "fetched",
    "is_on_host",
    "plan_statistics",
    "Move",
    "layer_numbers",
    "moves_of",
    "branch_moves",
]
