"""Mistakes that ports of these models make are seen by the comparison with transformers."""

from dataclasses import replace

import numpy as np
import pytest

from diptych.plans.families import FAMILIES, qwen
from diptych.plans.families.layouts import Layout, Link
from tests.families import models
from tests.families.test_exactness import differences, imported, run


def without(**settings):
    """A model with other settings."""
    return lambda config, parameters: (replace(config, **settings), parameters)


def changed(part: str, change):
    """A model with changed parameters."""
    return lambda config, parameters: (config, {n: change(x) if part in n else x for n, x in parameters.items()})


def reordered(name: str, parts: list[str]):
    """A model that was imported with the parts of a tensor in another order."""

    def apply(config, parameters):
        with models.patched(qwen, "Layout", lambda *of: _reorder(Layout(*of), name, parts)):
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


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_seen(name, tmp_path_factory):
    family = "qwen3_next"
    config, parameters = MISTAKES[name](*imported(family, tmp_path_factory.getbasetemp() / family))
    tokens = models.batch()
    expected = models.results(models.build(family), tokens)
    found = differences(family, config, run("torch", config, parameters, tokens), expected)
    assert max(found.values()) > 1e-6
