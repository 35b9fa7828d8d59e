"""Test the call path of num_residual_streams: the modules that hold its value are those that architecture.md lists."""

import re
import sys
from types import FrameType
from typing import Any

import numpy as np
import pytest

from diptych.plans.config import TransformerConfig
from tests.backends import backend_module
from tests.docs.pages import PAGES, ROOT

STREAMS = 7
"""A number that no other size of the model has."""
NAMES = ("num_residual_streams", "streams", "n", "S")
"""Names of the value in functions."""
KERNELS = {
    "diptych_kernels.api",
    "diptych_kernels.autodiff_rules",
    "diptych_kernels.launch_configs",
    "diptych_kernels.streams",
    "diptych_kernels.coefficients",
}


def documented() -> set[str]:
    """Return the modules of the path in the architecture page, without backend and without names in a module."""
    text = PAGES["architecture.md"].partition("**`num_residual_streams`**")[2].partition("A pipeline stage")[0]
    rows = [line.split(" | ")[1] for line in text.splitlines() if line.startswith("| ") and "PyTorch" not in line]
    found = set()
    for name in (name for row in rows for name in re.findall(r"`([\w.]+)`", row)):
        parts = name.split(".")
        while not any((ROOT / root / "/".join(parts)).with_suffix(end).exists() for root in ROOTS for end in ENDS):
            parts.pop()
        found.add(".".join(parts))
    return found


ROOTS, ENDS = (".", "kernels", "reference_torch"), (".py", "")


def modules_with_the_value(backend: str, impl: str) -> set[str]:
    """Return the modules in which a function has the value, in construction, forward and backward of a model."""
    found: set[str] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if event == "return" and module.startswith(("diptych", backend)):
            values = [frame.f_locals.get(name) for name in NAMES]
            if any(isinstance(value, int) and value == STREAMS for value in values):
                found.add(re.sub(r"^(diptych\.plans\.config)\..*", r"\1", module.removeprefix(f"{backend}.")))

    sizes: dict[str, Any] = dict(hidden_size=16, num_layers=1, num_attention_heads=2, seq_length=4, vocab_size=32)
    recompute: dict[str, Any] = dict(recompute_granularity="selective", recompute_modules=("mhc",))
    tokens = np.zeros((1, 4), np.int32)
    sys.setprofile(profile)
    try:
        config = TransformerConfig(
            **sizes, **recompute, impl=impl, enable_hyper_connections=True, num_residual_streams=STREAMS
        )
        train_once(backend, config, tokens)
    finally:
        sys.setprofile(None)
    return found


def train_once(backend: str, config: TransformerConfig, tokens: np.ndarray) -> None:
    """Run forward and backward of a new model."""
    model = backend_module({"reference_torch": "torch", "jax_impl": "jax"}[backend], "transformer").GPTModel(config)
    if backend == "reference_torch":
        import torch

        ids = torch.from_numpy(tokens).long()
        model(ids, ids).backward()
    else:
        import jax
        from flax import nnx

        graph, params = nnx.split(model, nnx.Param)
        ids = jax.numpy.asarray(tokens)
        jax.eval_shape(jax.grad(lambda params: nnx.merge(graph, params)(ids, ids)), params)


@pytest.mark.parametrize(
    ("backend", "impl"), [("reference_torch", "reference"), ("reference_torch", "triton"), ("jax_impl", "reference")]
)
def test_the_number_of_streams_passes_the_documented_modules(backend, impl):
    found = modules_with_the_value(backend, impl) | {"diptych.plans.config"}  # a field, which is no frame's variable
    expected = documented() if impl == "triton" else documented() - KERNELS
    assert found == expected
    assert len(expected - KERNELS) == 6
    on_path_to_a_kernel = expected - {"diptych.plans.model.parameters", "diptych.plans.recompute"}
    assert len(on_path_to_a_kernel - {"diptych_kernels.coefficients"}) <= 8
