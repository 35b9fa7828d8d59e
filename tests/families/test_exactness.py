"""Models of transformers, imported into both backends: logits, loss and every gradient in float64."""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from diptych.plans.checkpoint import MODEL, read_checkpoint, recorded_model, split_arrays
from diptych.plans.families.folder import import_folder
from diptych.plans.families.layouts import assemble
from parity.compare import relative_difference
from parity.implementations import OUTPUT, Values, make_inputs
from tests.backends import BACKENDS, IMPLEMENTATIONS, backend_module
from tests.families import models

pytestmark = pytest.mark.thorough


@cache
def imported(family: str, folder: Path):
    """A family's model in a checkpoint: its configuration and parameters."""
    found = import_folder(models.save(models.build(family), folder / "theirs"), folder / "ours")
    checkpoint = read_checkpoint(found.checkpoint)
    return recorded_model(checkpoint.settings), split_arrays(checkpoint.arrays, MODEL)


def mean_loss(logits: torch.Tensor, tokens: np.ndarray) -> torch.Tensor:
    """The mean loss of the next tokens."""
    targets = torch.from_numpy(tokens)[:, 1:].flatten()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets)


def run(backend: str, config, parameters, tokens: np.ndarray) -> models.Results:
    """The results of an imported model in a backend."""
    call = make_inputs([tokens])
    side = IMPLEMENTATIONS[backend](backend_module(backend, "transformer").GPTModel(config), call)
    values = Values(call.arrays, parameters)
    logits = torch.tensor(side.run(values, "float64", None).outputs[OUTPUT], requires_grad=True)
    loss = mean_loss(logits, tokens)
    (cotangent,) = torch.autograd.grad(loss, logits)
    found = side.run(values, "float64", {OUTPUT: cotangent.numpy()})
    return models.Results(found.outputs[OUTPUT], loss.item(), found.parameter_gradients)


def differences(family: str, config, found: models.Results, expected: models.Results) -> dict[str, float]:
    """Relative differences of logits, loss and every gradient; gradients by the names of transformers."""
    differing = {}
    others = models.family_of(family).other_names

    def usual(name: str) -> str:
        return ".".join(others.get(part, part) for part in name.split("."))

    left = {usual(name): gradient for name, gradient in expected.gradients.items()}
    for link in models.family_of(family).links(config):
        theirs = {layout.name: left.pop(usual(layout.name)) for layout in link.theirs}
        ours = {
            layout.name: assemble(layout, link.ours, found.gradients.__getitem__, np.dtype(np.float64))
            for layout in link.theirs
        }
        if link.are_rows_of_one:
            theirs, ours = ({link.theirs[0].name: np.concatenate([*x.values()])} for x in (theirs, ours))
        differing |= {name: relative_difference(ours[name], theirs[name]) for name in ours}
    assert not left
    return differing | {
        "logits": relative_difference(found.logits, expected.logits),
        "loss": abs(found.loss - expected.loss),
    }


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", models.FAMILIES)
def test_equals_transformers(family, backend, tmp_path_factory):
    config, parameters = imported(family, tmp_path_factory.getbasetemp() / family)
    tokens = models.batch()
    expected = models.results(models.build(family), tokens)
    found = differences(family, config, run(backend, config, parameters, tokens), expected)
    assert max(found.values()) < 1e-12, sorted(found.items(), key=lambda item: -item[1])[:5]
