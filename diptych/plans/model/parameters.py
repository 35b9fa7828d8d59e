"""Names, shapes and initial values of all parameters, shared by both backends.

A parameter has one canonical name in PyTorch, JAX and files, and its initial value depends on seed, name and shape
only. Layers are numbered over the whole model, so a pipeline stage has the same initial values as the full model.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from diptych.plans import amax_history
from diptych.plans.config import TransformerConfig
from diptych.plans.schedule.partition import get_num_layers_to_build, get_transformer_layer_offset

SINKHORN_FLOOR = 1e-30
"""Minimum entry after the first normalization, far below rounding; it prevents rows or columns that sum to 0."""


class Split(NamedTuple):
    """A division of a parameter among ranks of tensor parallelism: along one axis, which has sections of units."""

    axis: int
    sections: tuple[tuple[int, int], ...]
    """Number of units and width of a unit, by section, e.g. the heads of q, k and v. A rank has consecutive units of
    every section. A section of fewer units than ranks has each unit on several ranks."""


class ParameterSpec(NamedTuple):
    """Shape and initial distribution of one parameter: normal(mean, std), or the distribution named by ``drawn``."""

    shape: tuple[int, ...]
    mean: float = 0.0
    std: float = 0.0
    drawn: Literal["normal", "log rate", "time step"] = "normal"
    offset: float = 0.0
    """Added to the parameter where it is used: 1 for the gain of a zero-centered norm."""
    split: Split | None = None
    """Division among ranks of tensor parallelism; None: each of them has the whole parameter."""


def initial_value(seed: int, name: str, spec: ParameterSpec) -> np.ndarray:
    """Return the initial value of one parameter, float64.

    For the decay gate, ``log rate`` is the logarithm of uniform(1, 16), and ``time step`` is the inverse softplus of a
    time step that is log-uniform in (0.001, 0.1). The initial decay is then between 0.1% and 80% per token.

    The generator's key is a hash of seed and name, so a value does not depend on other parameters.
    """
    if spec.drawn == "normal" and spec.std == 0.0:
        return np.full(spec.shape, spec.mean)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    key = np.frombuffer(digest[:16], "<u8").astype(np.uint64)
    generator = np.random.Generator(np.random.Philox(key=key))
    if spec.drawn == "log rate":
        return np.log(generator.uniform(1.0, 16.0, spec.shape))
    if spec.drawn == "time step":
        return np.log(np.expm1(np.exp(generator.uniform(math.log(0.001), math.log(0.1), spec.shape))))
    return spec.mean + spec.std * generator.standard_normal(spec.shape)


def rotary_frequencies(head_dim: int, base: float) -> np.ndarray:
    """Return the angle per position of each turned pair, ``base**(-2i / head_dim)``, as [head_dim / 2] float64."""
    return base ** (-2.0 * np.arange(head_dim // 2) / head_dim)


def linear_spec(
    config: TransformerConfig, out_features: int, in_features: int, *heads: tuple[int, int], is_output: bool = False
) -> dict[str, ParameterSpec]:
    """Return the parameters of a linear layer ``y = x @ weight.T + bias``.

    ``is_output`` marks a projection back onto the residual, whose standard deviation is divided by
    sqrt(2 num_layers) so that the residual's variance does not grow with depth. ``heads`` are the sections of Split
    that divide the columns of an output projection, else the rows.
    """
    std = config.init_method_std / (math.sqrt(2 * config.num_layers) if is_output else 1.0)
    split = Split(1 if is_output else 0, heads) if heads else None
    specs = {"weight": ParameterSpec((out_features, in_features), std=std, split=split)}
    if config.add_bias_linear:
        specs["bias"] = ParameterSpec((out_features,), split=None if is_output else split)
    return specs


def attention_specs(config: TransformerConfig) -> dict[str, dict[str, ParameterSpec]]:
    """Return the parameters of causal self-attention, by submodule."""
    heads = config.num_attention_heads, config.head_dim
    groups = config.query_groups, config.head_dim
    queries = math.prod(heads)
    width = config.hidden_size
    specs = {"linear_qkv": linear_spec(config, queries + 2 * math.prod(groups), width, heads, groups, groups)}
    if config.qk_layernorm:
        for name, units in (("q_layernorm", heads), ("k_layernorm", groups)):
            joint = config.qk_layernorm_scope == "projection"
            specs[name] = norm_spec(config, *units) if joint else norm_spec(config, 1, config.head_dim)
    if config.attention_output_gate:
        specs["linear_gate"] = linear_spec(config, queries, width, heads)
    return specs | {"linear_proj": linear_spec(config, width, queries, heads, is_output=True)}


def latent_attention_specs(config: TransformerConfig) -> dict[str, dict[str, ParameterSpec]]:
    """Return the parameters of multi-head latent attention, by submodule.

    The down projection returns the latent and the shared part of the keys side by side, and the up projection for each
    head its part of the keys and its values.
    """
    heads, _, key, value = config.attention_heads("mla")
    rank = config.kv_lora_rank or 0
    shared = config.qk_pos_emb_head_dim or 0
    width = config.hidden_size
    up = heads, key - shared + value
    return {
        "linear_q_proj": linear_spec(config, heads * key, width, (heads, key)),
        "linear_kv_down_proj": linear_spec(config, rank + shared, width),
        "kv_layernorm": norm_spec(config, 1, rank),
        "linear_kv_up_proj": linear_spec(config, math.prod(up), rank, up),
        "linear_proj": linear_spec(config, width, heads * value, (heads, value), is_output=True),
    }


def delta_rule_specs(config: TransformerConfig, mixer: str) -> dict[str, dict[str, ParameterSpec]]:
    """Return the parameters of a gdn or kda mixer, by submodule.

    The short convolution's channels are those of q, k and v, in this order; a weight's last tap is the token's own.
    kda computes one decay per channel, and its output gate, through a bottleneck of the width of a value head.
    """
    heads, value_heads, key, value = config.linear_heads
    width = config.hidden_size
    channels = 2 * heads * key + value_heads * value
    taps = config.linear_conv_kernel_dim
    keys = heads, key
    values = value_heads, value
    decays = value_heads, key if mixer == "kda" else 1
    scalars = value_heads, 1
    qkv = Split(0, (keys, keys, values))
    specs = {
        "linear_qkv": linear_spec(config, channels, width, *qkv.sections),
        "conv1d": {"weight": ParameterSpec((channels, taps), std=taps**-0.5, split=qkv)},
        "linear_beta": linear_spec(config, value_heads, width, scalars),
    }
    if mixer == "kda":
        specs |= {
            "linear_decay_down": linear_spec(config, value, width),
            "linear_decay_up": linear_spec(config, value_heads * key, value, decays),
            "linear_gate_down": linear_spec(config, value, width),
            "linear_gate_up": linear_spec(config, value_heads * value, value, values),
        }
    else:
        specs |= {
            "linear_decay": linear_spec(config, value_heads, width, scalars),
            "linear_gate": linear_spec(config, value_heads * value, width, values),
        }
    return specs | {
        "decay_gate": {
            "A_log": ParameterSpec((value_heads,), drawn="log rate", split=Split(0, (scalars,))),
            "dt_bias": ParameterSpec((math.prod(decays),), drawn="time step", split=Split(0, (decays,))),
        },
        "out_norm": {"weight": ParameterSpec((value,), mean=1.0)},
        "linear_proj": linear_spec(config, width, value_heads * value, values, is_output=True),
    }


def mixer_specs(config: TransformerConfig, layer_number: int) -> dict[str, dict[str, ParameterSpec]]:
    """Return the parameters of a layer's mixer, by submodule."""
    mixer = config.layer(layer_number).mixer
    if mixer == "mla":
        return latent_attention_specs(config)
    return attention_specs(config) if mixer == "attention" else delta_rule_specs(config, mixer)


def mlp_specs(config: TransformerConfig, layer_number: int) -> dict[str, dict[str, ParameterSpec]]:
    """Return the parameters of a layer's MLP or mixture of experts, by submodule.

    The first layer of swiglu returns gate and value side by side. Experts have one array for each layer, [E, O, I],
    without bias.
    """
    layer = config.layer(layer_number)
    if not layer.moe:
        return _mlp_specs(config, layer.activation, layer.ffn_hidden_size)
    experts = config.num_moe_experts or 0
    specs = {"router": {"weight": ParameterSpec((experts, config.hidden_size), std=config.init_method_std)}}
    if config.moe_router_enable_expert_bias:
        specs["router"]["expert_bias"] = ParameterSpec((experts,))
    for name, spec in _mlp_specs(config, layer.activation, layer.ffn_hidden_size).items():
        weight = spec["weight"]
        assert weight.split is not None, "both layers of an MLP are divided"
        split = weight.split._replace(axis=weight.split.axis + 1)
        specs[f"experts.{name}"] = {"weight": weight._replace(shape=(experts, *weight.shape), split=split)}
    if config.moe_shared_expert_intermediate_size is not None:
        shared = _mlp_specs(config, layer.activation, config.moe_shared_expert_intermediate_size)
        specs |= {f"shared_experts.{name}": spec for name, spec in shared.items()}
        if config.moe_shared_expert_gate:
            specs["shared_expert_gate"] = linear_spec(config, 1, config.hidden_size)
    return specs


def _mlp_specs(config: TransformerConfig, activation: str, width: int) -> dict[str, dict[str, ParameterSpec]]:
    """Return the parameters of two linear layers around an activation function, by submodule."""
    channels = width, 1
    sections = [channels] * (2 if activation == "swiglu" else 1)
    return {
        "linear_fc1": linear_spec(config, width * len(sections), config.hidden_size, *sections),
        "linear_fc2": linear_spec(config, config.hidden_size, width, channels, is_output=True),
    }


def with_history(config: TransformerConfig, name: str, specs: dict[str, ParameterSpec]) -> dict[str, ParameterSpec]:
    """Return the parameters of a module and, if it is a linear layer with delayed scales, their history.

    Args:
        config: configuration of the model.
        name: canonical name of the module.
        specs: its other parameters.
    """
    history = {amax_history.NAME: ParameterSpec(amax_history.SHAPE)}
    return specs | (history if amax_history.has_history(config, name) else {})


def norm_spec(config: TransformerConfig, heads: int = 1, width: int | None = None) -> dict[str, ParameterSpec]:
    """Return the parameters of an RMSNorm over some heads together, each of so many channels; None: hidden_size."""
    offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
    width = width or config.hidden_size
    split = Split(0, ((heads, width),)) if heads > 1 else None
    return {"weight": ParameterSpec((heads * width,), mean=1.0 - offset, offset=offset, split=split)}


def hyper_connection_spec(config: TransformerConfig) -> dict[str, ParameterSpec]:
    """Return the parameters of one hyper-connection: projection, three gains, bias."""
    streams = config.num_residual_streams
    coefficients = streams * streams + 2 * streams
    return {
        "phi": ParameterSpec((streams * config.hidden_size, coefficients), std=config.init_method_std),
        "alpha": ParameterSpec((3,), mean=config.mhc_init_gating_factor),
        "bias": ParameterSpec((coefficients,)),
    }


def hyper_connection_head_spec(config: TransformerConfig) -> dict[str, ParameterSpec]:
    """Return the parameters of the learned sum of the streams after the last layer: projection, gain, bias."""
    streams = config.num_residual_streams
    return {
        "phi": ParameterSpec((streams * config.hidden_size, streams), std=config.init_method_std),
        "alpha": ParameterSpec((1,), mean=config.mhc_init_gating_factor),
        "bias": ParameterSpec((streams,)),
    }


def embedding_spec(config: TransformerConfig) -> dict[str, ParameterSpec]:
    """Return the parameters of the token embedding or of an untied output layer."""
    split = Split(0, ((config.vocab_size, 1),))
    return {"weight": ParameterSpec((config.vocab_size, config.hidden_size), std=config.init_method_std, split=split)}


def parameter_specs(
    config: TransformerConfig,
    pre_process: bool = True,
    post_process: bool = True,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> dict[str, ParameterSpec]:
    """Return the parameters of a stage (by default the whole model), by canonical name, in model order."""
    return dict(_walk(config, pre_process, post_process, vp_stage, pp_rank))


def check_values(values: Mapping[str, np.ndarray], specs: Mapping[str, ParameterSpec]) -> None:
    """Reject values that do not match the parameters one to one.

    Raises:
        ValueError: names or shapes differ.
    """
    missing = sorted(specs.keys() - values.keys())
    unknown = sorted(values.keys() - specs.keys())
    if missing or unknown:
        raise ValueError(
            f"values: expected the {len(specs)} parameters of the model, got {len(values)} values; missing: "
            f"{_first_names(missing)}; unknown: {_first_names(unknown)}; give one value for each name of parameters()"
        )
    for name, spec in specs.items():
        if values[name].shape != spec.shape:
            raise ValueError(f"values[{name!r}]: expected shape {spec.shape}, got {values[name].shape}")


def _first_names(names: Sequence[str]) -> str:
    """Return the first eight names as text, and the number of the others."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return (", ".join(names[:8]) or "none") + more


def _walk(
    config: TransformerConfig,
    pre_process: bool,
    post_process: bool,
    vp_stage: int | None,
    pp_rank: int | None,
) -> Iterator[tuple[str, ParameterSpec]]:
    """Yield name and specification of every parameter of a stage, in model order."""

    def prefixed(prefix: str, specs: dict[str, ParameterSpec]) -> Iterator[tuple[str, ParameterSpec]]:
        return ((f"{prefix}.{name}", spec) for name, spec in specs.items())

    def maps(prefix: str, by_module: dict[str, dict[str, ParameterSpec]]) -> Iterator[tuple[str, ParameterSpec]]:
        for module, specs in by_module.items():
            name = f"{prefix}.{module}"
            yield from prefixed(name, with_history(config, name, specs))

    tied = not config.untie_embeddings_and_output_weights
    if pre_process or (post_process and tied):
        yield from prefixed("embedding", embedding_spec(config))
    first = get_transformer_layer_offset(config, vp_stage, pp_rank)
    for number in range(first, first + get_num_layers_to_build(config, vp_stage, pp_rank)):
        prefix = f"decoder.layers.{number}"
        layer = config.layer(number)
        mixer_norm, mlp_norm = layer.norm_names
        if layer.self_attention_hyper_connection:
            yield from prefixed(f"{prefix}.self_attention_hyper_connection", hyper_connection_spec(config))
        yield from prefixed(f"{prefix}.{mixer_norm}", norm_spec(config))
        yield from maps(f"{prefix}.self_attention", mixer_specs(config, number))
        if layer.mlp_hyper_connection:
            yield from prefixed(f"{prefix}.mlp_hyper_connection", hyper_connection_spec(config))
        yield from prefixed(f"{prefix}.{mlp_norm}", norm_spec(config))
        yield from maps(f"{prefix}.mlp", mlp_specs(config, number))
    if post_process:
        if config.enable_hyper_connections and config.mhc_head == "learned":
            yield from prefixed("decoder.hyper_connection_head", hyper_connection_head_spec(config))
        yield from prefixed("decoder.final_layernorm", norm_spec(config))
        if not tied:
            yield from prefixed("output_layer", embedding_spec(config))
