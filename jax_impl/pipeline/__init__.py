"""Pipeline parallelism in one compiled program: ranks run ticks in lock-step, from the tables of
diptych/plans/schedule/named.py.

    step = make_pipeline_step(model, config)          the model undivided, config.pipeline_model_parallel_size ranks
    staged = step.stage_parameters(params)            nnx.State of the undivided model -> laid out over the ranks
    loss, gradients = step(staged, tokens, targets, training_step, samples)     [m, b, T], m microbatches
    staged = jax.tree.map(update, staged, gradients)  an optimizer works on staged trees leaf by leaf
    params = step.join_parameters(staged)             back; also of gradients and moments, for a checkpoint

Loss and gradients are the means over microbatches, as of the undivided model. Staged trees differ from the model's in
the shape of leaves: ``step.shapes(staged)`` has each leaf's own, by which weight decay is decided. Norms can be taken
over staged trees as they are: padding has gradient 0, and ends are there once. ``make_pipeline_step(...,
training=False, forward_only=True)`` takes the same staged parameters and gives the losses [m] alone.

Ranks may lie in several processes (jax.distributed), all of which give every step the same arguments.

PyTorch's executor is one process a rank, each with a list of its own; here the list is a table and the ranks are
devices of one program (``executor.py``). What ranks keep, and how a backward is split, lies in ``kept.py``; how
parameters of unlike stages are stacked, in ``stages.py``.
"""

from jax_impl.pipeline.offload import OffloadedPipeline
from jax_impl.pipeline.stages import StagedParameters
from jax_impl.pipeline.step import PipelineStep, make_pipeline_step

__all__ = ["make_pipeline_step", "PipelineStep", "OffloadedPipeline", "StagedParameters"]
