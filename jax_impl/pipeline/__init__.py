"""Pipeline parallelism in one compiled program, whose ranks run a schedule table in lock-step.

The tables come from diptych/plans/schedule/named.py. Usage:

    step = make_pipeline_step(model, config)          the single-device model; config.pipeline_model_parallel_size ranks
    staged = step.stage_parameters(params)            nnx.State of the single-device model -> distributed over the ranks
    loss, gradients = step(staged, tokens, targets, training_step, samples)     [m, b, T], m microbatches
    staged = jax.tree.map(update, staged, gradients)  an optimizer works on staged trees leaf by leaf
    params = step.join_parameters(staged)             back; also of gradients and moments, for a checkpoint

Loss and gradients are means over microbatches, equal to those of the single-device model. The leaves of staged trees
have other shapes than those of the model; ``step.shapes(staged)`` returns the shapes in the model, which decide on
weight decay. Norms of staged trees are correct without changes: padding has gradient 0, and a tree contains replicated
parameters once. With tensor parallelism, elements that several ranks hold are counted once only in
``step.counted_once(gradients)``.
``make_pipeline_step(..., training=False, forward_only=True)`` takes the same staged parameters and returns only the
losses [m].

Ranks may belong to several processes (jax.distributed), all of which pass the same arguments to every step.

In PyTorch, each rank is a process with its own list of actions. Here the lists form a table, and the ranks are devices
of one program (``executor.py``). ``saved.py`` defines the values saved for backward and the split backward.
``stages.py`` defines how parameters of different stages are stacked.
"""

from jax_impl.pipeline.module_executor import PipelineExecutor, split_batch
from jax_impl.pipeline.offload import OffloadedPipeline
from jax_impl.pipeline.step import PipelineStep, make_pipeline_step
from jax_impl.staged_parameters import StagedParameters

__all__ = [
    "OffloadedPipeline",
    "PipelineExecutor",
    "PipelineStep",
    "StagedParameters",
    "make_pipeline_step",
    "split_batch",
]
