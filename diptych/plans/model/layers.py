"""Layer settings, and the grammar of a configuration's layer pattern."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from diptych.plans.model.values import VALUES

MIXERS = ("attention", "mla", "gdn", "kda")
"""Softmax attention, multi-head latent attention, Gated DeltaNet, Kimi delta attention."""
SOFTMAX_MIXERS = frozenset({"attention", "mla"})
"""Mixers that attend to all earlier tokens; the others have a state of constant size."""
ACTIVATIONS = ("swiglu", "gelu")

Offloaded: TypeAlias = str | frozenset[str]
"""Values of a layer that move to host memory: those of some names of VALUES, or ``"all"``, also those with no name."""


@dataclass(frozen=True)
class LayerConfig:
    """Settings that may differ between layers."""

    mixer: str
    activation: str
    ffn_hidden_size: int
    self_attention_hyper_connection: bool
    mlp_hyper_connection: bool
    moe: bool = False
    """True for a mixture of experts, each of width ffn_hidden_size, in place of the MLP."""
    norm: Literal["pre", "post"] = "pre"
    """Place of the norms: on the input of each sublayer (pre), or on its output (post)."""
    storage: Literal["fp8"] | None = None
    """Storage of values saved for backward: in 8 bits (fp8), or None; see diptych.plans.activation_storage."""
    offload: "Offloaded | None" = None
    """Values saved for backward that move to host memory, or None; see diptych.plans.offload."""

    @property
    def norm_names(self) -> tuple[str, str]:
        """Names of the norms of mixer and MLP."""
        if self.norm == "pre":
            return "input_layernorm", "pre_mlp_layernorm"
        return "post_attention_layernorm", "post_mlp_layernorm"

    @property
    def description(self) -> str:
        """The entry of ``layer_pattern`` that parse_layer turns into these settings."""
        options = {
            "moe": self.moe,
            "post-norm": self.norm == "post",
            "no-attention-hc": not self.self_attention_hyper_connection,
            "no-mlp-hc": not self.mlp_hyper_connection,
        }
        chosen = [option for option, is_chosen in options.items() if is_chosen]
        return "+".join([self.mixer, self.activation, f"ffn={self.ffn_hidden_size}", *chosen])


def is_named(number: int, text: str | None) -> bool:
    """Return True if a setting names a layer; None names all."""
    return text is None or number in layer_numbers(text)


@lru_cache(maxsize=64)
def layer_numbers(text: str, field: str = "layers") -> frozenset[int]:
    """Return the layers that a setting names, as in ``0-3,7``.

    Args:
        text: the value of the setting.
        field: its name, for the message.

    Raises:
        ValueError: the text has another form.
    """
    found: set[int] = set()
    for part in text.split(","):
        numbers = _numbers(part)
        if numbers is None:
            raise ValueError(f"{field}: expected numbers of layers such as 0-3,7, got {text!r}")
        found.update(numbers)
    return frozenset(found)


def _numbers(text: str) -> range | None:
    """Return the numbers of ``7`` or ``0-3``, or None if the text has another form."""
    ends = re.fullmatch(r"([0-9]{1,6})(?:-([0-9]{1,6}))?", text)
    if ends is None or int(ends[2] or ends[1]) < int(ends[1]):
        return None
    return range(int(ends[1]), int(ends[2] or ends[1]) + 1)


@lru_cache(maxsize=64)
def offloaded_values(text: str, field: str = "layers") -> Mapping[int, Offloaded]:
    """Return the values that a setting offloads, by layer, as in ``0-3:fc1+activation,7``, where all of layer 7 move.

    Args:
        text: the value of the setting.
        field: its name, for the message.

    Raises:
        ValueError: the text has another form, names no value of VALUES, or names different values of a layer.
    """
    found: dict[int, Offloaded] = {}
    for part in text.split(","):
        layers, has_names, names = part.partition(":")
        numbers = _numbers(layers)
        if numbers is None:
            raise ValueError(
                f"{field}: expected numbers of layers, with names of values where not all move, such as "
                f"0-3:fc1+activation,7, got {text!r}"
            )
        unknown = [name for name in names.split("+") if has_names and name not in VALUES]
        if unknown:
            raise ValueError(f"{field}: expected names of values out of {VALUES}, got {unknown[0]!r} in {text!r}")
        values = frozenset(names.split("+")) if has_names else "all"
        differs = next((number for number in numbers if found.get(number, values) != values), None)
        if differs is not None:
            raise ValueError(
                f"{field}: expected one entry for each layer, got {text!r}, where two name layer {differs}"
            )
        found.update(dict.fromkeys(numbers, values))
    return found


def is_offloaded(name: str | None, offloaded: Offloaded | None) -> bool:
    """Return True if the value with a name (None: a value without a name) is among the values that move."""
    return offloaded == "all" or (name is not None and offloaded is not None and name in offloaded)


def format_offload(moved: Mapping[int, Offloaded]) -> str:
    """Return the text that offloaded_values reads."""
    parts: list[tuple[int, str]] = []
    for values in dict.fromkeys(moved.values()):
        names = "" if values == "all" else ":" + "+".join(name for name in VALUES if name in values)
        runs = format_numbers(number for number, each in moved.items() if each == values).split(",")
        parts += [(int(run.split("-")[0]), run + names) for run in runs]
    return ",".join(part for _, part in sorted(parts))


def format_numbers(numbers: Iterable[int]) -> str:
    """Return the text that layer_numbers reads."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


class LayerDefaults(NamedTuple):
    """Default settings of an entry of ``layer_pattern``."""

    hidden_size: int
    activation: str
    ffn_hidden_size: int | None
    """Inner width of the MLP; None: the default of the activation function."""
    moe_ffn_hidden_size: int | None
    """Inner width of an expert; None: that of an MLP."""
    enable_hyper_connections: bool
    self_attention_hyper_connection: bool
    mlp_hyper_connection: bool


@lru_cache(maxsize=4096)
def parse_layer(description: str, defaults: LayerDefaults) -> LayerConfig:
    """Parse one entry of ``layer_pattern``.

    Grammar: ``mixer[+option]...`` where an option is ``moe``, an activation (``gelu``, ``swiglu``), ``ffn=<inner
    width>``, ``post-norm``, ``no-attention-hc`` or ``no-mlp-hc`` (both without effect without mHC); e.g.
    ``attention+gelu+no-mlp-hc``, ``kda+moe``.

    Args:
        description: the entry.
        defaults: values of omitted settings.

    Raises:
        ValueError: unknown mixer or option, or a width below 1.
    """
    mixer, *options = description.split("+")
    if mixer not in MIXERS:
        raise ValueError(f"layer_pattern: expected a mixer out of {MIXERS}, got {mixer!r} in {description!r}")
    activation = defaults.activation
    moe = "moe" in options
    ffn = (defaults.moe_ffn_hidden_size if moe else None) or defaults.ffn_hidden_size
    kinds = ["activation" if option in ACTIVATIONS else option.split("=")[0] for option in options]
    if len(set(kinds)) < len(kinds):
        raise ValueError(f"layer_pattern: expected each kind of option once, got {description!r}")
    attention_hc = defaults.self_attention_hyper_connection
    mlp_hc = defaults.mlp_hyper_connection
    for option in options:
        if option in ACTIVATIONS:
            activation = option
        elif option.startswith("ffn=") and option[4:].isascii() and option[4:].isdecimal() and int(option[4:]) > 0:
            ffn = int(option[4:])
        elif option in ("moe", "post-norm"):
            continue
        elif option == "no-attention-hc":
            attention_hc = False
        elif option == "no-mlp-hc":
            mlp_hc = False
        else:
            raise ValueError(
                f"layer_pattern: expected an option out of {ACTIVATIONS}, moe, ffn=<width of at least 1>, "
                f"post-norm, no-attention-hc, no-mlp-hc, got {option!r} in {description!r}"
            )
    if ffn is None:
        ffn = 4 * defaults.hidden_size if activation == "gelu" else math.ceil(defaults.hidden_size / 3) * 8
    hyper = defaults.enable_hyper_connections
    norm = "post" if "post-norm" in options else "pre"
    return LayerConfig(mixer, activation, ffn, hyper and attention_hc, hyper and mlp_hc, moe, norm)
