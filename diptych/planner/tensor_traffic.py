"""Bytes that tensor-parallel ranks send each other in a step, and the rounds of their exchanges.

Around a region (the mixer or the MLP of a layer) n ranks exchange the hidden states, X bytes for all tokens. In a
ring, a gather or a scattered sum takes n - 1 rounds, in each of which a rank sends X / n; a sum takes both.

    sequence parallelism    gather before and scattered sum after; in backward the opposite
    without                 sum after; in backward the sum of the gradients before

So a region takes two such exchanges forward, two backward, and two more where full recompute replays it. A replay ends
with the last value that backward reads, which may come before the last sum.
"""

import math
from typing import NamedTuple

from diptych.plans.config import ITEM_SIZES, TransformerConfig
from diptych.plans.mesh import unsharded
from diptych.plans.model.parameters import parameter_specs
from diptych.plans.recompute import RecomputeBlock, recompute_blocks
from diptych.plans.schedule.partition import get_stage_place, num_stages
from diptych.plans.tensor_parallel import gradient_is_partial, repeated_entries


class RingExchanges(NamedTuple):
    """Exchanges of one microbatch on one rank, each a gather or a scattered sum of n - 1 rounds."""

    forward: float
    """Bytes that the rank sends."""
    backward: float
    rounds_forward: int
    rounds_backward: int


def hidden_bytes(config: TransformerConfig, batch: int) -> int:
    """Return the bytes X of the hidden states of all tokens of a microbatch, at the width of one stream."""
    tokens = batch * config.seq_length // config.context_parallel_size
    return tokens * config.hidden_size * ITEM_SIZES[config.compute_dtype]


def block_exchanges(config: TransformerConfig, block: RecomputeBlock, batch: int) -> RingExchanges:
    """Return the exchanges around the regions of a block of layers.

    Args:
        config: the model.
        block: the layers, and whether backward replays them.
        batch: sequences of the microbatch.
    """
    regions = 2 * len(block.layers)
    replayed = 0
    if block.kind == "full":
        last_sum = 1 if config.sequence_parallel else 2
        replayed = 2 * regions - (0 if _reads_last_sum(config, block) else last_sum)
    norms = _joint_norms(config, block)
    size = hidden_bytes(config, batch)
    means = size // config.hidden_size // ITEM_SIZES[config.compute_dtype] * _wide(config)
    again = 1 + (block.kind == "full")
    exchanged = (
        2 * regions * size + 2 * norms * means,
        (2 * regions + replayed) * size + 2 * norms * again * means,
    )
    return _sent(config, *exchanged, 2 * (regions + norms), 2 * regions + replayed + 2 * norms * again)


def end_exchanges(config: TransformerConfig, name: str, batch: int) -> RingExchanges:
    """Return the exchanges of the embedding or the head.

    Args:
        config: the model.
        name: ``"embedding"``, whose sum is in the type of parameters, or ``"head"``, with the cross entropy.
        batch: sequences of the microbatch.
    """
    size = hidden_bytes(config, batch)
    elements = size // ITEM_SIZES[config.compute_dtype]
    both = config.sequence_parallel
    if name == "embedding":
        size = elements * ITEM_SIZES[config.params_dtype]
        return _sent(config, size * (1 if both else 2), size * both, 1 if both else 2, int(both))
    loss = 3 * 2 * elements // config.hidden_size * _wide(config)
    return _sent(config, size * both + loss, size * (1 if both else 2), both + 6, 1 if both else 2)


def repeated_gradient_bytes(config: TransformerConfig, stage: int) -> int:
    """Return the bytes of a stage's gradients that tensor-parallel ranks sum once per step.

    Args:
        config: the model.
        stage: global number of the stage.
    """
    last = num_stages(config) - 1
    specs = parameter_specs(unsharded(config))
    own = parameter_specs(config, stage == 0, stage == last, *get_stage_place(config, stage))
    count = 0
    for name in own:
        spec = specs[name]
        if not gradient_is_partial(name, config.sequence_parallel):
            continue
        elements = math.prod(spec.shape)
        if spec.split is not None:
            shared = repeated_entries(spec.split, config.tensor_model_parallel_size, 0).total
            elements = elements // spec.shape[spec.split.axis] * shared
        count += elements
    return count * ITEM_SIZES[config.params_dtype]


def exchanged_bytes(config: TransformerConfig, batch: int) -> list[int]:
    """Return the bytes that a rank sends around regions for one microbatch, by pipeline rank."""
    found = [0.0] * config.pipeline_model_parallel_size
    last = num_stages(config) - 1
    for stage in range(last + 1):
        place = get_stage_place(config, stage)
        parts = [block_exchanges(config, block, batch) for block in recompute_blocks(config, *place)]
        parts += [end_exchanges(config, "embedding", batch)] if stage == 0 else []
        parts += [end_exchanges(config, "head", batch)] if stage == last else []
        found[place.pp_rank] += sum(part.forward + part.backward for part in parts)
    return [math.ceil(each) for each in found]


def _reads_last_sum(config: TransformerConfig, block: RecomputeBlock) -> bool:
    """Return True if backward reads the sum of the last region of a block, or a value that is computed after it."""
    layer = config.layer(block.layers[-1])
    return layer.mlp_hyper_connection or layer.norm == "post" or (layer.moe and config.moe_aux_loss_coeff > 0)


def _joint_norms(config: TransformerConfig, block: RecomputeBlock) -> int:
    """Return the norms over the heads of all ranks in a block."""
    if not config.qk_layernorm or config.qk_layernorm_scope != "projection":
        return 0
    return 2 * sum(config.layer(number).mixer == "attention" for number in block.layers)


def _wide(config: TransformerConfig) -> int:
    """Return the bytes of an element of statistics and of the loss."""
    return max(4, ITEM_SIZES[config.compute_dtype])


def _sent(
    config: TransformerConfig, forward: float, backward: float, count_forward: int, count_backward: int
) -> RingExchanges:
    """Return the share of one rank in the bytes that all ranks exchange, and the rounds of its exchanges."""
    n = config.tensor_model_parallel_size
    share = (n - 1) / n
    return RingExchanges(share * forward, share * backward, (n - 1) * count_forward, (n - 1) * count_backward)
