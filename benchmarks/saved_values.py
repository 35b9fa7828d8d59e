"""The table in docs/recompute.md: named values that each recompute mode saves for backward, read from both backends.

python -m benchmarks.saved_values          (updates it)
"""

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import torch
from flax import nnx

import jax_impl.recompute
import jax_impl.transformer
import reference_torch.recompute
import reference_torch.transformer
from diptych.plans.config import TransformerConfig
from diptych.plans.model.values import VALUES

PAGE = Path(__file__).parent.parent / "docs" / "recompute.md"
BEGIN = "<!-- table: python -m benchmarks.saved_values -->\n"
END = "<!-- end of table -->\n"
CONFIG = TransformerConfig(
    hidden_size=32, num_layers=4, num_attention_heads=4, seq_length=16, enable_hyper_connections=True
)
MODULES = ("mhc", "layernorm", "core_attn", "activation", "mlp")
MODES = {
    "none": {},
    **{name: {"recompute_granularity": "selective", "recompute_modules": (name,)} for name in MODULES},
    "all five": {"recompute_granularity": "selective", "recompute_modules": MODULES},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform"},
}


def saved_bytes(config: TransformerConfig) -> dict[str, int]:
    """Return the bytes of each named value that are saved for backward.

    Raises:
        AssertionError: if the backends differ.
    """
    tokens = np.arange(2 * config.seq_length).reshape(2, -1)
    model = reference_torch.transformer.GPTModel(config)
    ours = reference_torch.recompute.residual_report(lambda t: model(t, t), torch.from_numpy(tokens))
    graph, params = nnx.split(jax_impl.transformer.GPTModel(config), nnx.Param)
    inputs = jnp.asarray(tokens)
    theirs = jax_impl.recompute.residual_report(lambda p: nnx.merge(graph, p)(inputs, inputs), params)
    sizes = {name: value.bytes for name, value in ours.items()}
    if sizes != {name: value.bytes for name, value in theirs.items()}:
        raise AssertionError(f"the backends save different values: {ours} and {theirs}")
    return sizes


def table() -> str:
    """Return the Markdown table of values and recompute modes; bytes are relative to no recompute."""
    sizes = {mode: saved_bytes(replace(CONFIG, **flags)) for mode, flags in MODES.items()}
    lines = ["| value | " + " | ".join(MODES) + " |", "|---" * (len(MODES) + 1) + "|"]
    for name in VALUES:
        whole = sizes["none"].get(name, 0)
        if whole:
            cells = (f"{sizes[mode].get(name, 0) / whole:.2g}" for mode in MODES)
            lines.append(f"| {name} | " + " | ".join("" if cell == "0" else cell for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Update the table in the page."""
    page = PAGE.read_text()
    start = page.index(BEGIN) + len(BEGIN)
    end = page.index(END)
    PAGE.write_text(page[:start] + table() + page[end:])


if __name__ == "__main__":
    main()
