"""The table of a model family: how config.json and the tensors of a Hugging Face folder map to this project's model."""

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from diptych.plans.config import TransformerConfig
from diptych.plans.families.layouts import Link
from diptych.plans.text_files import one_line

COMMON_KEYS = frozenset(
    {
        *("architectures", "model_type", "transformers_version", "dtype", "torch_dtype", "use_cache", "auto_map"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "tokenizer_class", "_name_or_path"),
        *("output_attentions", "output_hidden_states", "return_dict", "is_encoder_decoder", "chunk_size_feed_forward"),
        *("id2label", "label2id", "problem_type", "is_decoder", "add_cross_attention", "cross_attention_hidden_size"),
        *("_attn_implementation_autoset", "decoder_start_token_id", "finetuning_task", "prefix", "pruned_heads"),
        *("task_specific_params", "tie_encoder_decoder", "torchscript", "tf_legacy_loss", "use_bfloat16"),
    }
)
"""Keys of config.json that do not change what a model computes."""


OWN_KEYS = frozenset({"layer_types", "tie_word_embeddings"})
"""Keys of config.json that all families read in the same way."""
DENSE = "dense"
SPARSE = "sparse"
"""Values of mlp_layer_types: an MLP, and a mixture of experts."""
MOST_LAYERS = 10_000
"""Largest accepted number of layers; lists of all layers are made of it."""


class FamilyError(ValueError):
    """An error for a model that no family describes; the message names the setting or the tensor."""


class Setting(NamedTuple):
    """A setting that both formats have."""

    theirs: str
    """Key in config.json, with dots between nested keys."""
    ours: str
    """Field of TransformerConfig."""
    default: Any = None
    """Value of transformers if the key is missing; None: it is required."""


class Required(NamedTuple):
    """A setting of config.json that must have one value."""

    theirs: str
    value: Any
    reason: str = "it is not implemented"
    default: Any = None
    """Value of transformers if the key is missing; None: the required one."""


class ExpertSettings(NamedTuple):
    """Settings of models whose number of experts is not 0."""

    key: str
    """Key of the number of experts in config.json."""
    default: int
    """Its value in transformers if the key is missing."""
    settings: tuple[Setting, ...]
    fixed: Mapping[str, Any]
    """Settings of TransformerConfig that all such models share."""


@dataclass(frozen=True)
class Family:
    """The table of one family."""

    name: str
    """Name, the model_type that is written."""
    model_types: tuple[str, ...]
    """Values of model_type that are read."""
    architecture: str
    """Class of transformers that reads an exported folder."""
    settings: tuple[Setting, ...]
    fixed: Mapping[str, Any]
    """Settings of TransformerConfig that all models of the family share."""
    required: tuple[Required, ...]
    ignored_keys: frozenset[str]
    """Further keys of config.json that do not change what the model computes."""
    layer_types: Mapping[str, str]
    """Entries of layer_pattern by their names in layer_types."""
    links: Callable[[TransformerConfig], list[Link]]
    """Return the layouts of all tensors of a model."""
    experts: ExpertSettings | None = None
    """Settings of mixtures of experts; None: the family has none."""
    ignored_tensors: tuple[str, ...] = ()
    """Beginnings of the names of tensors that transformers does not read either."""
    other_names: Mapping[str, str] = field(default_factory=dict)
    """Usual parts of the names of tensors, by what files may have in their place; transformers reads both."""
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    """Return config.json with the keys of ``settings``, where the family's own keys differ from them."""
    write: Callable[[Mapping[str, Any]], dict[str, Any]] = dict
    """Return config.json with the family's own keys; the reverse of ``read``."""


def _with_experts(family: Family, has_experts: bool) -> tuple[tuple[Setting, ...], dict[str, Any]]:
    """Return the settings and the fixed values of a family's models with or without experts."""
    if family.experts is None or not has_experts:
        return family.settings, dict(family.fixed)
    return (*family.settings, *family.experts.settings), {**family.fixed, **family.experts.fixed}


def settings_of(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of TransformerConfig for the content of config.json.

    Raises:
        FamilyError: a setting is missing, unknown or not implemented.
    """
    config = _read(family, config)
    known = {s.theirs for s in (*_with_experts(family, True)[0], *family.required)} | family.ignored_keys
    known |= COMMON_KEYS | OWN_KEYS | ({"mlp_layer_types"} if family.experts else set())
    for required in family.required:
        value = _get(config, required.theirs, required.value if required.default is None else required.default)
        if value != required.value or isinstance(value, bool) != isinstance(required.value, bool):
            raise FamilyError(
                f"config.json, {required.theirs}: expected {required.value!r}, got {one_line(value)}: {required.reason}"
            )
    unknown = next((path for path in _paths(config, known) if path not in known), None)
    if unknown is not None:
        value = one_line(_get(config, unknown, None))
        raise FamilyError(
            f"config.json: expected settings of {family.name}, got {one_line(unknown)} = {value}, whose meaning is "
            "unknown; remove it if it does not change what the model computes"
        )
    has_experts = family.experts is not None and _experts_of(family.experts, config) > 0
    settings, found = _with_experts(family, has_experts)
    for setting in settings:
        value = _get(config, setting.theirs, setting.default)
        if value is None:
            raise FamilyError(f"config.json: expected {setting.theirs}, got none")
        found[setting.ours] = value
    mlps = config.get("mlp_layer_types") if has_experts else None
    found["layer_pattern"] = ",".join(_pattern(family, config.get("layer_types"), mlps, found["num_layers"]))
    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool):
        raise FamilyError(f"config.json, tie_word_embeddings: expected true or false, got {one_line(tied)}")
    found["untie_embeddings_and_output_weights"] = not tied
    return found


def parse_model(family: Family, config: Mapping[str, Any]) -> TransformerConfig:
    """Return the model for the content of config.json, in float32.

    Raises:
        FamilyError: a setting is missing, unknown, not implemented or impossible.
    """
    settings = settings_of(family, config)
    try:
        return TransformerConfig(**settings)
    except ValueError as error:
        theirs = {setting.ours: setting.theirs for setting in _with_experts(family, True)[0]}
        pattern = re.compile(r"\b(" + "|".join(theirs) + r")\b")
        message = pattern.sub(lambda found: theirs[found[0]], one_line(error, 500))
        raise FamilyError(f"config.json, {message}") from None


def _read(family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the keys of the family's settings.

    Raises:
        FamilyError: the number of layers or a setting that is converted is invalid.
    """
    layers = integer(config, "num_hidden_layers", least=1)
    if layers > MOST_LAYERS:
        raise FamilyError(
            f"config.json, num_hidden_layers: expected at most {MOST_LAYERS:,} layers, got {one_line(layers)}"
        )
    return family.read(_with_usual_keys(config))


def integer(config: Mapping[str, Any], key: str, default: int | None = None, least: int = 0) -> int:
    """Return an integer of config.json.

    Args:
        config: content of config.json.
        key: the key.
        default: value if the key is missing; None: it is required.
        least: smallest value.

    Raises:
        FamilyError: the value is something else.
    """
    value = config.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise FamilyError(f"config.json, {key}: expected an integer >= {least}, got {one_line(value)}")
    return value


def _experts_of(experts: ExpertSettings, config: Mapping[str, Any]) -> int:
    """Return the number of experts of a model; 0 if no layer has experts."""
    number = integer(config, experts.key, experts.default)
    mlps = config.get("mlp_layer_types")
    return number if not isinstance(mlps, list) or SPARSE in mlps else 0


def config_of(family: Family, model: TransformerConfig, like: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the content of config.json for a model.

    Args:
        family: the table.
        model: the model.
        like: config.json of the folder from which the model came; its other settings are kept. None: defaults.

    Raises:
        FamilyError: the family has no such model; the message names the setting.
    """
    has_experts = model.num_moe_experts is not None
    settings, fixed = _with_experts(family, has_experts)
    for name, value in fixed.items():
        if getattr(model, name) != value:
            raise FamilyError(f"{name}: expected {value!r} in {family.name}, got {getattr(model, name)!r}")
    config = {} if like is None else copy.deepcopy(_read(family, like))
    for setting in settings:
        value = _value(model, setting.ours)
        if setting.ours == "seq_length" and like is not None:  # a run on shorter sequences keeps the model's maximum
            value = max(value, _get(config, setting.theirs, value))
        _set(config, setting.theirs, value)
    for required in family.required:
        if like is None or _get(config, required.theirs, None) is not None:
            _set(config, required.theirs, required.value)
    names = {ours.split("+")[0]: theirs for theirs, ours in family.layer_types.items()}
    mixers = [model.layer(number).mixer for number in range(model.num_layers)]
    missing = next((mixer for mixer in mixers if mixer not in names), None)
    if missing is not None:
        raise FamilyError(f"layer_pattern: expected layers out of {', '.join(names)} in {family.name}, got {missing}")
    config["layer_types"] = [names[mixer] for mixer in mixers]
    if family.experts is not None:
        config["mlp_layer_types"] = [SPARSE if model.layer(n).moe else DENSE for n in range(model.num_layers)]
        if not has_experts and (like is None or _experts_of(family.experts, _read(family, like)) > 0):
            _set(config, family.experts.key, 0)
    config["tie_word_embeddings"] = not model.untie_embeddings_and_output_weights
    config["model_type"] = family.name
    config["architectures"] = [family.architecture]
    config = family.write(config)
    again = settings_of(family, config)
    exported = TransformerConfig(**again)
    for number in range(model.num_layers):
        if exported.layer(number).description != model.layer(number).description:
            raise FamilyError(
                f"layer_pattern: expected layer {number} as {family.name} has it, {exported.layer(number)}, got "
                f"{model.layer(number)}"
            )
    compared = [name for name in again if name not in ("layer_pattern", "seq_length")]
    differing = next((n for n in compared if again[n] not in (getattr(model, n), _value(model, n))), None)
    if differing is not None:
        raise FamilyError(
            f"{differing}: expected {again[differing]!r}, as {family.name} has it, got {_value(model, differing)!r}"
        )
    return config


def _value(model: TransformerConfig, name: str) -> Any:
    """Return a setting of a model; of one that is None, the value that follows from the other settings."""
    value = getattr(model, name)
    if value is None and name in ("num_query_groups", "kv_channels", "ffn_hidden_size"):
        return {
            "num_query_groups": model.query_groups,
            "kv_channels": model.head_dim,
            "ffn_hidden_size": next((x.ffn_hidden_size for x in _layers(model) if not x.moe), None),
        }[name]
    return value


def _layers(model: TransformerConfig) -> Iterator[Any]:
    return map(model.layer, range(model.num_layers))


def _pattern(family: Family, types: Any, mlps: Any, num_layers: int) -> Sequence[str]:
    """Return the shortest sequence of layers that, repeated, gives all layers.

    Raises:
        FamilyError: the number of layers differs, or a type is unknown.
    """
    mlps = [DENSE] * num_layers if mlps is None else mlps
    if not isinstance(mlps, list) or len(mlps) != num_layers or any(mlp not in (DENSE, SPARSE) for mlp in mlps):
        raise FamilyError(
            f"config.json, mlp_layer_types: expected a list of {num_layers} out of {DENSE}, {SPARSE}, got "
            f"{one_line(mlps)}"
        )
    if not isinstance(types, list) or len(types) != num_layers:
        raise FamilyError(
            f"config.json, layer_types: expected a list of {num_layers} types, got {one_line(types)}; or give "
            "full_attention_interval"
        )
    for name in types:
        if not isinstance(name, str) or name not in family.layer_types:
            known = ", ".join(family.layer_types)
            raise FamilyError(f"config.json, layer_types: expected types out of {known}, got {one_line(name)}")
    layers = [family.layer_types[name] + "+moe" * (mlp == SPARSE) for name, mlp in zip(types, mlps, strict=True)]
    for length in range(1, num_layers + 1):
        if all(layer == layers[number % length] for number, layer in enumerate(layers)):
            return layers[:length]
    return layers


def _with_usual_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with the keys of transformers 5, for those of earlier versions, by its order of precedence.

    Raises:
        FamilyError: the settings of the rotary embedding are no mapping.
    """
    found = dict(config)
    for key in ("rope_scaling", "rope_parameters"):
        if found.get(key) is not None and not isinstance(found[key], Mapping):
            raise FamilyError(f"config.json, {key}: expected a mapping, got {one_line(found[key])}")
    rope = found.pop("rope_scaling", None) or found.pop("rope_parameters", None)
    top = {key: found.pop(key) for key in ("rope_theta", "partial_rotary_factor") if key in found}
    if rope or top:
        rope = {**top, **(rope or {})}
        kind = rope.pop("type", "default")
        found["rope_parameters"] = {"rope_type": kind, **rope}
    interval = found.pop("full_attention_interval", None)
    layers = found.get("num_hidden_layers")
    if "layer_types" not in found and isinstance(interval, int) and isinstance(layers, int) and interval > 0:
        found["layer_types"] = [
            "full_attention" if (n + 1) % interval == 0 else "linear_attention" for n in range(layers)
        ]
    return found


def _paths(config: Mapping[str, Any], known: Collection[str], prefix: str = "") -> Iterator[str]:
    """Yield the paths of all settings; a mapping is one setting unless some of its entries are known."""
    for key, value in config.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and any(name.startswith(f"{path}.") for name in known):
            yield from _paths(value, known, f"{path}.")
        else:
            yield path


def _get(config: Any, path: str, default: Any) -> Any:
    """Return a nested value, or the default if a key is missing."""
    for key in path.split("."):
        if not isinstance(config, Mapping) or key not in config:
            return default
        config = config[key]
    return config


def _set(config: dict[str, Any], path: str, value: Any) -> None:
    *outer, last = path.split(".")
    for key in outer:
        config = config.setdefault(key, {})
    config[last] = value
