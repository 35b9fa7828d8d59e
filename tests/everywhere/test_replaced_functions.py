"""The delta rule that models of transformers call, by fla's argument names, replaced by ours.

transformers also passes settings of the model, which fla's functions ignore and ours refuse.
"""

import importlib

import numpy as np
import pytest

from reference_torch.delta_rule import chunk_gated_delta_rule, chunk_kda
from tests.families.models import batch, build, results

REPLACED = {
    "kimi_linear": ("chunk_kimi_delta_attention", chunk_kda),
    "olmo_hybrid": ("torch_chunk_gated_delta_rule", chunk_gated_delta_rule),
    "qwen3_5_text": ("torch_chunk_gated_delta_rule", chunk_gated_delta_rule),
    "qwen3_next": ("torch_chunk_gated_delta_rule", chunk_gated_delta_rule),
}
"""By family: the name in the modeling module, and our function."""


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("family", REPLACED)
def test_a_model_computes_the_same_with_our_function(family, monkeypatch):
    name, function = REPLACED[family]
    model = build(family)
    tokens = batch()
    expected = results(model, tokens)
    calls = 0

    def counted(*args, use_cache=None, output_router_logits=None, **kwargs):
        nonlocal calls
        calls += 1
        return function(*args, **kwargs)

    monkeypatch.setattr(importlib.import_module(type(model).__module__), name, counted)
    found = results(model, tokens)
    assert calls == 2, "of the two layers"
    assert found.loss == pytest.approx(expected.loss, rel=1e-10)
    np.testing.assert_allclose(found.logits, expected.logits, atol=1e-9 * np.abs(expected.logits).max())
    largest = max(np.abs(gradient).max() for gradient in expected.gradients.values())
    for parameter, gradient in expected.gradients.items():
        np.testing.assert_allclose(found.gradients[parameter], gradient, atol=1e-9 * largest, err_msg=parameter)
