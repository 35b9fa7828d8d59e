"""A pipeline stage for the schedules: the part of the model, a microbatch, and the forward step function."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from diptych.plans.config import TransformerConfig
from diptych.plans.context.exchange import PIPELINED, exchange_options
from diptych.plans.context.sequences import concatenate_sequences
from diptych.plans.model.data import Batch
from diptych.plans.recompute import RecomputeBlock
from reference_torch.context_parallel import build_cp_context
from reference_torch.context_parallel.wavefront import MESSAGE_KINDS, finish
from reference_torch.offload import TensorOffloadManager
from reference_torch.tensor_parallel import UNSHARDED, TensorParallel
from reference_torch.transformer import GPTModel


class Microbatch(NamedTuple):
    """A microbatch as every stage receives it."""

    batch: Batch
    step: int
    """Training step, for dropout."""
    first: int
    """Index of its first sequence within the global batch, for dropout."""
    training: bool
    cp: ProcessGroup | None = None
    """Ranks that share its sequences; None: this rank has complete sequences."""
    tensor_parallel: TensorParallel = UNSHARDED
    """Ranks that share the layers of the stage."""


class PipelineStage(GPTModel):
    """A stage whose input [B, T, S * D] is set before the call, with residual streams concatenated.

    With moe_aux_loss_coeff, the input has one more channel, see aux_loss.join_aux_loss.
    """

    input_tensor: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Device of its parameters, or of its input if it has no parameters."""
        tensor = next(self.parameters(), self.input_tensor)
        assert tensor is not None, "a stage without parameters has an input"
        return tensor.device

    def set_input_tensor(self, input_tensor: Tensor) -> None:
        """Set the input of the next call, from the previous stage."""
        self.input_tensor = input_tensor

    def forward(self, inputs: Tensor, targets: Tensor | None = None, **arguments: Any) -> Tensor:
        """Run the stage as GPTModel does, on the input that was set.

        Args:
            inputs: tokens; only the first stage reads them.
            targets: see GPTModel.
            arguments: see GPTModel.

        Returns:
            The output with residual streams concatenated [B, T, S * D]; on the last stage that of GPTModel.
        """
        joins = self.config.enable_hyper_connections and not self.config.moe_aux_loss_coeff
        streams = self.config.num_residual_streams if joins else None
        if not self.pre_process:
            assert self.input_tensor is not None, "the schedule sets a stage's input before it calls it"
            inputs = self.input_tensor
            self.input_tensor = None
            inputs = inputs if streams is None else inputs.unflatten(-1, (streams, -1))
        output = super().forward(inputs, targets, **arguments)
        return output if self.post_process or streams is None else output.flatten(-2)


def offload_layers(stages: Sequence[PipelineStage], config: TransformerConfig) -> TensorOffloadManager:
    """Return an offload manager of all layers of some stages, with all layers evicted; disabled without offload.

    Args:
        stages: the stages.
        config: configuration of the model.
    """
    offloaded = {number: config.layer(number).offload for number in range(config.num_layers)}
    manager = TensorOffloadManager(
        config.enable_tensor_offload or config.enable_activation_offload,
        config.tensor_offload_pin_memory,
        config.tensor_offload_num_prefetch_layers,
        parameters=config.enable_tensor_offload,
        activations=config.enable_activation_offload,
        activation_min_bytes=config.activation_offload_min_bytes,
        activation_layers=[number for number, values in offloaded.items() if values is not None],
        activation_values={number: values for number, values in offloaded.items() if isinstance(values, frozenset)},
    )
    for stage in stages:
        for number, layer in stage.decoder.layers.items():
            manager.register_layer(int(number), layer)
    manager.offload_all_layers()
    return manager


def model_provider(
    config: TransformerConfig,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> PipelineStage:
    """Build one stage; GPTModel documents the arguments."""
    return PipelineStage(config, pre_process, post_process, vp_stage, pp_rank)


def forward_step(
    data_iterator: Iterator[Microbatch], model: PipelineStage
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """Run one microbatch through a stage, and return the output and the reducer that computes the loss.

    Args:
        data_iterator: microbatches.
        model: the stage.
    """
    batch, step, first, training, cp, ranks = next(data_iterator)
    inputs, targets, context = (
        _complete_sequences(batch, first, model) if cp is None else _sequence_part(batch, first, model, cp)
    )
    output = model(inputs, targets, step=step, training=training, tensor_parallel=ranks, **context)

    def reduce(loss: Tensor) -> tuple[Tensor, ...]:
        if model.config.calculate_per_token_loss:
            return loss * targets.numel(), torch.tensor(targets.numel()), loss
        return loss, loss

    return output, reduce


def _complete_sequences(batch: Batch, first: int, model: PipelineStage) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return tokens, targets and further arguments of the model for complete sequences."""
    tokens, targets, starts = batch
    inputs, targets = (torch.from_numpy(ids).to(model.device) for ids in (tokens, targets))
    samples = torch.arange(first, first + len(tokens), device=model.device)
    documents = None if starts is None else torch.from_numpy(starts)  # read on the host
    return inputs, targets, {"samples": samples, "document_starts": documents}


def _replayed_kinds(blocks: Sequence[RecomputeBlock]) -> tuple[str, ...]:
    """Return the kinds of received messages that backward reads again, because it replays layers or their mixers."""
    if not torch.is_grad_enabled():
        return ()
    if any(block.kind == "full" for block in blocks):
        return MESSAGE_KINDS
    return ("state", "keys and values") if any("core_attn" in block.dropped for block in blocks) else ()


def _sequence_part(
    batch: Batch, first: int, model: PipelineStage, cp: ProcessGroup
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return tokens, targets and further arguments of the model for this rank's part of the sequences."""
    if model.config.cp_exchange == PIPELINED and not torch.is_grad_enabled():
        finish(cp)  # without a backward, this rank could run ahead of all others
    tokens, targets, starts = batch
    concatenated = concatenate_sequences(tokens, targets, np.arange(first, first + len(tokens)), starts)
    cu_seqlens = torch.from_numpy(concatenated.cu_seqlens)
    kernel = model.config.linear_conv_kernel_dim
    options = exchange_options(model.config)
    context = build_cp_context(cu_seqlens.to(model.device), cp, kernel, cu_seqlens, **options)
    context = replace(context, timeout=model.config.pipeline_timeout)
    if context.messages is not None:
        context.messages.replayed_kinds = _replayed_kinds(model.decoder.blocks)
    parts = (np.array_split(x, context.size, axis=-1)[context.rank] for x in concatenated[:4])
    inputs, targets, samples, positions = (torch.from_numpy(x.copy()).to(model.device) for x in parts)
    return inputs, targets, {"samples": samples, "positions": positions, "cp_context": context}
