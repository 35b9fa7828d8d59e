"""The mesh of ranks: data, context, pipeline and tensor parallelism."""

from dataclasses import replace

from diptych.plans.config import TransformerConfig

MESH_AXES = ("dp", "cp", "pp", "tp")
"""Data-, context-, pipeline- and tensor-parallel axes. The last axis varies fastest, so that the ranks that communicate
most are neighbours: rank = ((dp_rank * cp_size + cp_rank) * pp_size + pp_rank) * tp_size + tp_rank."""


def mesh_shape(config: TransformerConfig, count: int) -> tuple[int, int, int, int]:
    """Return the size of each of MESH_AXES.

    Args:
        config: the model and its parallelism.
        count: total number of ranks, a multiple of config.model_parallel_size.
    """
    return (
        count // config.model_parallel_size,
        config.context_parallel_size,
        config.pipeline_model_parallel_size,
        config.tensor_model_parallel_size,
    )


def unsharded(config: TransformerConfig) -> TransformerConfig:
    """Return the configuration of the same model on one rank."""
    return replace(
        config,
        pipeline_model_parallel_size=1,
        virtual_pipeline_model_parallel_size=None,
        num_layers_in_first_pipeline_stage=None,
        num_layers_in_last_pipeline_stage=None,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        pipeline_model_parallel_layout=None,
        pipeline_schedule=None,
        pipeline_schedule_file=None,
        microbatch_group_size_per_vp_stage=None,
        context_parallel_size=1,
        tensor_model_parallel_size=1,
        sequence_parallel=False,
    )


def replica_settings(config: TransformerConfig) -> str:
    """Return the settings whose product is the number of ranks of a replica, as text for error messages."""
    names = ("context_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size")
    return " * ".join(name for name in names if getattr(config, name) > 1) or names[-1]
