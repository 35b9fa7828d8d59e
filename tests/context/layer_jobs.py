"""Layers and models whose sequences are divided over ranks, and what one process computes."""

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from diptych.plans.config import TransformerConfig
from diptych.plans.context.exchange import exchange_options
from reference_torch.context_parallel import build_cp_context, cp_attention, cp_short_convolution
from reference_torch.ops import causal_attention, short_convolution
from reference_torch.transformer import GPTModel
from tests.context.jobs import OFFSETS, TOKENS


class Layer(NamedTuple):
    """A convolution (of so many taps) or attention (None) over sequences."""

    offsets: tuple[int, ...]
    kernel_size: int | None
    exchange: str = "all_gather"


def layer_arrays(layer: Layer) -> list[np.ndarray]:
    """What it takes, of all tokens, the convolution's weight last; and the cotangent of its outputs first."""
    rng = np.random.default_rng(2)
    if layer.kernel_size is not None:
        shapes = [(1, TOKENS, 6), (1, TOKENS, 6), (6, layer.kernel_size)]
    else:
        shapes = [(1, TOKENS, 4, 6), (1, TOKENS, 4, 6), (1, TOKENS, 2, 6), (1, TOKENS, 2, 6)]
    return [rng.standard_normal(shape) for shape in shapes]


def layer_unsharded(layer: Layer) -> list[np.ndarray]:
    """Outputs and gradients, sequence by sequence."""
    cotangent, *arrays = [torch.from_numpy(x).requires_grad_() for x in layer_arrays(layer)]
    outputs = []
    for begin, end in itertools.pairwise(layer.offsets):
        if begin == end:
            continue
        own = [x if x.dim() == 2 else x[:, begin:end] for x in arrays]
        if layer.kernel_size is None:
            outputs.append(causal_attention(*own))
        else:
            outputs.append(short_convolution(*own, torch.arange(end - begin)))
    output = torch.cat(outputs, dim=1)
    (output * cotangent).sum().backward()
    return [output.detach().numpy(), *(x.grad.numpy() for x in arrays)]


def layer_part(layer: Layer) -> list[np.ndarray]:
    """The same of this rank's part."""
    group = dist.group.WORLD if dist.is_initialized() else None
    offsets = torch.tensor(layer.offsets, dtype=torch.int32)
    context = build_cp_context(offsets, group, layer.kernel_size, cp_exchange=layer.exchange)
    length = TOKENS // context.size
    part = slice(context.rank * length, (context.rank + 1) * length)
    whole = [torch.from_numpy(x) for x in layer_arrays(layer)]
    cotangent, *arrays = [(x if x.dim() == 2 else x[:, part]).clone().requires_grad_() for x in whole]
    run = cp_attention if layer.kernel_size is None else cp_short_convolution
    output = run(*arrays, context)
    (output * cotangent).sum().backward()
    return [output.detach().numpy(), *(x.grad.numpy() for x in arrays)]


def layer_parts(layers: list[Layer]) -> list[Any]:
    """One after the other."""
    return [layer_part(layer) for layer in layers]


LAYERS = [Layer(tuple(offsets), size) for size in (None, 1, 4, 9, 30) for offsets in OFFSETS.values()]
"""Taps that reach over the rank before, and over several."""
PIPELINED_LAYERS = [layer._replace(exchange="pipelined") for layer in LAYERS]


MODEL = TransformerConfig(
    hidden_size=16,
    num_layers=3,
    num_attention_heads=4,
    num_query_groups=2,
    ffn_hidden_size=16,
    vocab_size=32,
    seq_length=24,
    init_method_std=0.3,
    params_dtype="float64",
    layer_pattern="kda,gdn,attention",
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    hidden_dropout=0.1,
)
MODELS = {
    "hybrid": MODEL,
    "mhc, biases, recomputed": replace(
        MODEL,
        enable_hyper_connections=True,
        num_residual_streams=2,
        add_bias_linear=True,
        recompute_granularity="selective",
        recompute_modules=("core_attn", "mhc", "layernorm"),
    ),
    "fused attention": replace(MODEL, use_flash_attn=True),
    "zigzag": replace(MODEL, cp_attention_layout="zigzag"),
    "zigzag, fused, attention recomputed": replace(
        MODEL,
        cp_attention_layout="zigzag",
        use_flash_attn=True,
        recompute_granularity="selective",
        recompute_modules=("core_attn",),
    ),
    "whole layers recomputed": replace(
        MODEL, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2
    ),
}
PIPELINED_MODELS = {
    f"pipelined, {name}": replace(model, cp_exchange="pipelined")
    for name, model in MODELS.items()
    if model.cp_attention_layout == "contiguous"
}
ALL_MODELS = MODELS | PIPELINED_MODELS
STARTS = np.array([[0, 1, 9, 24], [0, 12, 17, 17]], np.int32)


def model_batch() -> tuple[np.ndarray, np.ndarray]:
    """Tokens and targets, two sequences."""
    return tuple(np.random.default_rng(3).integers(0, 32, (2, 2, 24)).astype(np.int32))


def model_offsets() -> np.ndarray:
    """Where documents begin in both sequences, end to end."""
    return np.append((STARTS + np.array([[0], [24]])).ravel(), 48).astype(np.int32)


def model_unsharded(name: str) -> tuple[float, dict[str, np.ndarray]]:
    """Loss and gradients."""
    model = GPTModel(
        replace(
            ALL_MODELS[name],
            recompute_granularity=None,
            recompute_method=None,
            recompute_num_layers=None,
            recompute_modules=(),
        )
    )
    tokens, targets = map(torch.from_numpy, model_batch())
    loss = model(tokens, targets, step=3, document_starts=torch.from_numpy(STARTS))
    loss.backward()
    return loss.item(), {name: p.grad.numpy() for name, p in model.named_parameters()}


def model_part(name: str) -> tuple[float, dict[str, np.ndarray]]:
    """The same of this rank's tokens."""
    model, group = GPTModel(ALL_MODELS[name]), dist.group.WORLD if dist.is_initialized() else None
    kernel, options = MODEL.linear_conv_kernel_dim, exchange_options(ALL_MODELS[name])
    context = build_cp_context(torch.from_numpy(model_offsets()), group, kernel, **options)
    place = torch.arange(48).chunk(context.size)[context.rank]
    tokens, targets = (torch.from_numpy(x).flatten()[place][None] for x in model_batch())
    arguments = {"samples": (place // 24)[None], "positions": place % 24, "step": 3}
    loss = model(tokens, targets, **arguments, cp_context=context)
    loss.backward()
    return loss.item(), {name: p.grad.numpy() for name, p in model.named_parameters()}
