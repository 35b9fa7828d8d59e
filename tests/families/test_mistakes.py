"""Mistakes that ports of these models make are seen by the comparison with transformers."""

from dataclasses import replace

import numpy as np
import pytest

from diptych.plans.families import FAMILIES, blocks, qwen
from diptych.plans.families.layouts import Layout, Link
from parity.compare import relative_difference
from tests.families import models
from tests.families.test_exactness import imported, run


def without(**settings):
    """A model with other settings."""
    return lambda config, parameters: (replace(config, **settings), parameters)


def changed(part: str, change):
    """A model with changed parameters."""
    return lambda config, parameters: (config, {n: change(x) if part in n else x for n, x in parameters.items()})


def reordered(name: str, parts: list[str]):
    """A model that was imported with the parts of a tensor in another order."""

    def apply(config, parameters):
        other = lambda *of: _reorder(Layout(*of), name, parts)  # noqa: E731
        with models.patched(qwen, "Layout", other), models.patched(blocks, "Layout", other):
            wrong = {layout.name: (layout, link) for link in _links(config) for layout in link.ours}
        theirs = {layout.name: layout for link in FAMILIES["qwen3_next"].links(config) for layout in link.theirs}
        ours = {layout.name: link for link in FAMILIES["qwen3_next"].links(config) for layout in link.ours}
        found = dict(parameters)
        for key, (target, link) in wrong.items():
            if any(name in layout.name for layout in link.theirs):
                found[key] = _misread(target, link, theirs, ours, parameters)
        return config, found

    return apply


def _links(config) -> list[Link]:
    return FAMILIES["qwen3_next"].links(config)


def _reorder(layout: Layout, name: str, parts: list[str]) -> Layout:
    return replace(layout, parts={part: layout.parts[part] for part in parts}) if name in layout.name else layout


def _misread(target: Layout, link: Link, theirs, ours, parameters) -> np.ndarray:
    from diptych.plans.families.layouts import assemble

    def file(name: str) -> np.ndarray:
        sources = ours[target.name].ours
        return assemble(theirs[name], sources, parameters.__getitem__, np.dtype(np.float64))

    return assemble(target, link.theirs, file, np.dtype(np.float64))


def pre_norm(config, parameters):
    """A model whose attention layers have their norms before attention and MLP."""
    names = {"post_mlp_layernorm": "pre_mlp_layernorm", "post_attention_layernorm": "input_layernorm"}
    renamed = {}
    for name, value in parameters.items():
        parts = name.split(".")
        renamed[".".join(names.get(part, part) for part in parts)] = value
    return replace(config, layer_pattern=config.layer_pattern.replace("+post-norm", "")), renamed


def normed_by_head(config, parameters):
    """A model that norms queries and keys per head, with the gains of the first head."""
    width = config.head_dim
    first = {n: x[:width] if "q_layernorm" in n or "k_layernorm" in n else x for n, x in parameters.items()}
    return replace(config, qk_layernorm_scope="head"), first


MISTAKES = {
    "rotary embedding of all channels": without(rotary_percent=1.0),
    "base of the rotary embedding": without(rotary_base=10000.0),
    "norms multiply by w, not 1 + w": without(layernorm_zero_centered_gamma=False),
    "epsilon of the norms": without(layernorm_epsilon=1e-5),
    "heads not normed": changed("q_layernorm", np.zeros_like),
    "gate before queries": reordered("q_proj", ["gate", "q"]),
    "z before v": reordered("in_proj_qkvz", ["q", "k", "z", "v"]),
    "k before q": reordered("in_proj_qkvz", ["k", "q", "v", "z"]),
    "decay before beta": reordered("in_proj_ba", ["a", "b"]),
    "taps of the convolution reversed": changed("conv1d", lambda x: x[:, ::-1].copy()),
    "halves of the MLP exchanged": changed("linear_fc1", lambda x: np.concatenate(np.split(x, 2)[::-1])),
    "decay without its bias": changed("dt_bias", np.zeros_like),
}
MISTAKES_OF_EXPERTS = {
    "weights of the experts not normalised": without(moe_router_norm_topk_prob=False),
    "one expert too few": without(moe_router_topk=1),
    "experts exchanged": changed("experts.linear_fc2", lambda x: x[::-1].copy()),
    "halves of the experts exchanged": changed(
        "experts.linear_fc1", lambda x: np.concatenate(np.split(x, 2, axis=-2)[::-1], axis=-2)
    ),
    "gate of the shared expert always half open": changed("shared_expert_gate", np.zeros_like),
}
MISTAKES_OF_KIMI = {
    "own and shared parts of the queries exchanged": changed(
        "linear_q_proj", lambda x: np.roll(x.reshape(4, 10, -1), 4, axis=1).reshape(x.shape)
    ),
    "shared part of the keys first": changed("linear_kv_down_proj", lambda x: np.roll(x, 4, axis=0)),
    "values before keys": changed(
        "linear_kv_up_proj", lambda x: np.roll(x.reshape(4, 13, -1), 7, axis=1).reshape(x.shape)
    ),
    "epsilon of the latent's norm": without(mla_norm_epsilon=None),
    "no bias of the choice": changed("expert_bias", np.zeros_like),
    "weights of the experts not scaled": without(moe_router_topk_scaling_factor=1.0),
}
MISTAKES_OF_OLMO = {
    "norms before attention": pre_norm,
    "queries and keys normed per head": normed_by_head,
    "positions": without(rotary_percent=1.0),
    "epsilon of the output norm": without(linear_norm_epsilon=None),
    "beta at most 1": without(linear_allow_neg_eigval=False),
}
MISTAKES_OF_LLAMA = {
    "rotary embedding of half the channels": without(rotary_percent=0.5),
    "keys and values exchanged": changed("linear_qkv", lambda x: np.concatenate([x[:48], x[72:], x[48:72]])),
}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("qwen3_next", name) for name in MISTAKES),
        *(("qwen3_next with experts", name) for name in MISTAKES_OF_EXPERTS),
        *(("olmo_hybrid", name) for name in MISTAKES_OF_OLMO),
        *(("kimi_linear", name) for name in MISTAKES_OF_KIMI),
        *(("llama", name) for name in MISTAKES_OF_LLAMA),
    ],
)
def test_a_mistake_is_seen(family, name, tmp_path_factory):
    mistakes = MISTAKES | MISTAKES_OF_EXPERTS | MISTAKES_OF_OLMO | MISTAKES_OF_KIMI | MISTAKES_OF_LLAMA
    mistake = mistakes[name]
    config, parameters = mistake(*imported(family, tmp_path_factory.getbasetemp() / family))
    tokens = models.batch()
    expected = models.results(models.build(family), tokens)
    found = run("torch", config, parameters, tokens)
    assert relative_difference(found.logits, expected.logits) > 1e-6
