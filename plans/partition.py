"""Which layers a pipeline stage builds.

Stage ``vp_stage * pp_size + pp_rank`` holds the stages' layers in model order: consecutive stages sit
on consecutive ranks and wrap around, so the virtual stages of one rank are ``pp_size`` stages apart.
"""

from plans.config import TransformerConfig


def get_num_layers_to_build(config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None) -> int:
    """Number of layers of one stage.

    Args:
        config: the whole model.
        vp_stage: index of the virtual stage within its rank; None: 0.
        pp_rank: pipeline rank; None: 0.

    Raises:
        ValueError: no such stage.
    """
    _check_stage(config, vp_stage, pp_rank)
    return config.num_layers // num_stages(config)


def get_transformer_layer_offset(
    config: TransformerConfig, vp_stage: int | None = None, pp_rank: int | None = None
) -> int:
    """Global number, from 0, of a stage's first layer. Arguments and errors as above."""
    _check_stage(config, vp_stage, pp_rank)
    stage = (vp_stage or 0) * config.pipeline_model_parallel_size + (pp_rank or 0)
    return stage * (config.num_layers // num_stages(config))


def num_stages(config: TransformerConfig) -> int:
    """Pipeline ranks times virtual stages per rank."""
    return config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)


def check_stage_ends(
    config: TransformerConfig, pre_process: bool, post_process: bool, vp_stage: int | None, pp_rank: int | None
) -> None:
    """Refuse an embedding or a head in the middle of the model.

    Raises:
        ValueError: pre_process on a stage that is not the first, or post_process on one that is not the last.
    """
    _check_stage(config, vp_stage, pp_rank)
    stage, last = (vp_stage or 0) * config.pipeline_model_parallel_size + (pp_rank or 0), num_stages(config) - 1
    for name, wanted, place in (("pre_process", pre_process, 0), ("post_process", post_process, last)):
        if wanted and stage != place:
            raise ValueError(
                f"{name}: expected False on stage {stage} of {last + 1} (only stage {place} has that end), got True; "
                "give vp_stage and pp_rank, or a configuration without pipeline stages"
            )


def _check_stage(config: TransformerConfig, vp_stage: int | None, pp_rank: int | None) -> None:
    for name, value, size in (
        ("vp_stage", vp_stage, config.virtual_pipeline_model_parallel_size or 1),
        ("pp_rank", pp_rank, config.pipeline_model_parallel_size),
    ):
        if not 0 <= (value or 0) < size:
            raise ValueError(f"{name}: expected 0 <= {name} < {size}, got {value}")
