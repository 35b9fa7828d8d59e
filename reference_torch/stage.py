"""A pipeline stage as the schedules call it: the model's part, one microbatch, and the function that runs both."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from diptych.plans.config import TransformerConfig
from diptych.plans.context.exchange import PIPELINED, exchange_options
from diptych.plans.context.sequences import end_to_end
from diptych.plans.model.data import Batch
from reference_torch.context_parallel import build_cp_context
from reference_torch.context_parallel.wavefront import WHAT, finish
from reference_torch.offload import TensorOffloadManager
from reference_torch.transformer import GPTModel


class Microbatch(NamedTuple):
    """What every stage is given of a microbatch."""

    batch: Batch
    step: int
    """Training step, for dropout."""
    first: int
    """Number of its first sequence within the global batch, for dropout."""
    training: bool
    cp: ProcessGroup | None = None
    """The ranks that share its sequences; None: this one has all."""


class PipelineStage(GPTModel):
    """A stage that is handed its input before it is called, residual streams side by side [B, T, S * D]."""

    input_tensor: Tensor | None = None

    @property
    def device(self) -> torch.device:
        """Where it computes: with its parameters, or if it has none, where its input lies."""
        place = next(self.parameters(), self.input_tensor)
        assert place is not None, "a stage without parameters has an input"
        return place.device

    def set_input_tensor(self, input_tensor: Tensor) -> None:
        """What the next call reads; from the stage before."""
        self.input_tensor = input_tensor

    def forward(self, inputs: Tensor, targets: Tensor | None = None, **arguments: Any) -> Tensor:
        """As GPTModel, but only the first stage reads ``inputs``, and streams leave side by side."""
        streams = self.config.num_residual_streams if self.config.enable_hyper_connections else None
        if not self.pre_process:
            assert self.input_tensor is not None, "the schedule sets a stage's input before it calls it"
            inputs, self.input_tensor = self.input_tensor, None
            inputs = inputs if streams is None else inputs.unflatten(-1, (streams, -1))
        output = super().forward(inputs, targets, **arguments)
        return output if self.post_process or streams is None else output.flatten(-2)


def offload_layers(stages: Sequence[PipelineStage], config: TransformerConfig) -> TensorOffloadManager:
    """A manager of all layers of some stages, which have left the device; without offload it does nothing."""
    manager = TensorOffloadManager(
        config.enable_tensor_offload or config.enable_activation_offload,
        config.tensor_offload_pin_memory,
        config.tensor_offload_num_prefetch_layers,
        parameters=config.enable_tensor_offload,
        activations=config.enable_activation_offload,
        activation_min_bytes=config.activation_offload_min_bytes,
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
    """Build one stage; see GPTModel."""
    return PipelineStage(config, pre_process, post_process, vp_stage, pp_rank)


def forward_step(
    data_iterator: Iterator[Microbatch], model: PipelineStage
) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """One microbatch through one stage, as the schedules call it: what the stage gives, and what makes a loss of it."""
    batch, step, first, training, cp = next(data_iterator)
    inputs, answers, told = _whole(batch, first, model) if cp is None else _part(batch, first, model, cp)
    output = model(inputs, answers, step=step, training=training, **told)

    def reduce(loss: Tensor) -> tuple[Tensor, ...]:
        if model.config.calculate_per_token_loss:
            return loss * answers.numel(), torch.tensor(answers.numel()), loss
        return loss, loss

    return output, reduce


def _whole(batch: Batch, first: int, model: PipelineStage) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Tokens, targets, and what else a model is told of whole sequences."""
    tokens, targets, starts = batch
    inputs, answers = (torch.from_numpy(ids).to(model.device) for ids in (tokens, targets))
    samples = torch.arange(first, first + len(tokens), device=model.device)
    documents = None if starts is None else torch.from_numpy(starts)  # read on the host
    return inputs, answers, {"samples": samples, "document_starts": documents}


def _asked_for_again(config: TransformerConfig) -> tuple[str, ...]:
    """Of what ranks hand on, that which backward needs again: of layers, or of their mixers, that it recomputes."""
    if not torch.is_grad_enabled():
        return ()
    if config.recompute_granularity == "full":
        return WHAT
    return ("state", "keys and values") if "core_attn" in config.recompute_modules else ()


def _part(batch: Batch, first: int, model: PipelineStage, cp: ProcessGroup) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The same of this rank's part of them."""
    if model.config.cp_exchange == PIPELINED and not torch.is_grad_enabled():
        finish(cp)  # no backward holds this rank back from running ahead of all others
    tokens, targets, starts = batch
    laid = end_to_end(tokens, targets, np.arange(first, first + len(tokens)), starts)
    offsets = torch.from_numpy(laid.cu_seqlens)
    kernel, travel = model.config.linear_conv_kernel_dim, exchange_options(model.config)
    context = build_cp_context(offsets.to(model.device), cp, kernel, offsets, **travel)
    context = replace(context, timeout=model.config.pipeline_timeout)
    if context.handing is not None:
        context.handing.keeps = _asked_for_again(model.config)
    parts = (np.array_split(x, context.size, axis=-1)[context.rank] for x in laid[:4])
    inputs, answers, samples, positions = (torch.from_numpy(x.copy()).to(model.device) for x in parts)
    return inputs, answers, {"samples": samples, "positions": positions, "cp_context": context}
