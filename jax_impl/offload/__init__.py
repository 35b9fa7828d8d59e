"""Tensor offload: layers' parameters that lie in host memory until their layer is used.

What moves when is decided in ``plans/offload.py``; twin of ``reference_torch/offload``, which follows hooks while the
program runs. Here the plan is walked when the step is traced, so what comes out is one program with every copy in its
place, and XLA runs the copies beside the computation:

    offload = OffloadedStep(config, params, num_microbatches=1)       what the plan says of a training step
    params = offload.place(params)                                    layers to pinned_host
    ...                                                               and inside the jitted step:
    (loss, gradients), here = offload.value_and_grad(loss_fn, params, offload.begin(params), batch)
    params, state = offload.update(change, params, state, gradients, here)

A model whose configuration enables offload calls ``run_offloaded`` where it would run its layers one by one; with
parameters that are on the device already, its moves do nothing.
"""

from jax_impl.offload.device import Layers, Pass
from jax_impl.offload.moves import Move, layer_numbers, moves_of
from jax_impl.offload.stack import run_offloaded
from jax_impl.offload.step import OffloadedStep

__all__ = ["Layers", "Move", "OffloadedStep", "Pass", "layer_numbers", "moves_of", "run_offloaded"]
