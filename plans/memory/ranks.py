"""Bytes of every pipeline rank, term by term: what lies there all the time, and what a step's microbatches keep."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from plans.config import TransformerConfig
from plans.memory.graph import ITEM_SIZES
from plans.offload import layer_storages, next_layers, rank_layers, rank_uses
from plans.parameters import parameter_specs
from plans.partition import num_stages


def parameter_bytes(config: TransformerConfig, stage: int) -> int:
    """Bytes of a stage's parameters, and of their gradients: exact, with its copy of a tied embedding."""
    p, last = config.pipeline_model_parallel_size, num_stages(config) - 1
    specs = parameter_specs(config, stage == 0, stage == last, stage // p, stage % p)
    return sum(math.prod(spec.shape) for spec in specs.values()) * ITEM_SIZES[config.params_dtype]


