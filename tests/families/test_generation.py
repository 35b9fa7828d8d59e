"""Greedy decoding of an imported model equals that of transformers, with cached states and keys."""

import numpy as np
import pytest
import torch

from diptych.plans.families.folder import import_folder
from tests.backends import TORCH_DAILY, backend_module
from tests.families import models

pytestmark = pytest.mark.thorough
NEW = 64


@pytest.mark.parametrize("backend", TORCH_DAILY)
@pytest.mark.parametrize("family", models.FAMILIES)
def test_generates_what_transformers_generates(family, backend, tmp_path):
    model = models.build(family)
    checkpoint = import_folder(models.save(model, tmp_path / "theirs"), tmp_path / "ours").checkpoint
    prompt = models.batch(5, (1, 7))
    with models.Exact(), torch.no_grad():
        expected = model.generate(
            torch.from_numpy(prompt), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
    loaded = backend_module(backend, "saving").load_model(checkpoint, seq_length=prompt.size + NEW)
    decoder = backend_module(backend, "decoding").Decoder(loaded)
    tokens = [*prompt[0]]
    for _ in range(NEW):
        tokens.append(int(decoder.next_logits(np.array(tokens)).argmax()))
    assert tokens == expected[0].tolist()
    assert len(set(tokens[prompt.size :])) > 3
