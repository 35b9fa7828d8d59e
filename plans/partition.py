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


def _check_stage(config: TransformerConfig, vp_stage: int | None, pp_rank: int | None) -> None:
    for name, value, size in (
        ("vp_stage", vp_stage, config.virtual_pipeline_model_parallel_size or 1),
        ("pp_rank", pp_rank, config.pipeline_model_parallel_size),
    ):
        if not 0 <= (value or 0) < size:
            raise ValueError(f"{name}: expected 0 <= {name} < {size}, got {value}")
