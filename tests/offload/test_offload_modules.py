"""offload_modules in models that this project did not write, with what training loops use."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from reference_torch.offload import offload_modules
from reference_torch.recompute import recompute_modules
from tests.everywhere.torch_models import MODELS, assert_same, build


def train(model: nn.Module, inputs: dict[str, torch.Tensor], manager=None) -> dict[str, torch.Tensor]:
    """Three steps with AdamW, clipping, a scaler and an average of the weights: everything at the end, by name."""
    torch.manual_seed(3)
    average = AveragedModel(copy.deepcopy(model), multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler("cpu")
    losses = []
    for number in range(3):
        result = model(**inputs)
        output = result if isinstance(result, torch.Tensor) else result.logits
        loss = output.square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if manager is not None and number == 1:
            manager.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        average.update_parameters(model)
        losses.append(loss.detach())
    found = {f"average {name}": t.clone() for name, t in average.state_dict().items()}
    found |= {name: t.clone() for name, t in model.state_dict().items()}
    for number, moments in optimizer.state_dict()["state"].items():
        found |= {f"{number} {name}": torch.as_tensor(t).clone() for name, t in moments.items()}
    return found | {"losses": torch.stack(losses)}


@pytest.mark.parametrize("activations", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_others_trains_as_without_offload(name, activations):
    example = MODELS[name]
    expected = train(build(name), example.inputs())
    other = build(name)
    manager = offload_modules(other, example.offloaded, activations=activations, activation_min_bytes=64)
    assert len(manager.resident_layers) <= 1
    assert_same(train(other, example.inputs(), manager), expected)
    assert manager.stats["copies_in"] > 3 * len(manager.layer_params) - 3
    manager.close()
    assert type(next(other.parameters())) is nn.Parameter


def test_with_recompute():
    example = MODELS["Llama"]
    expected = train(build("Llama"), example.inputs())
    other = build("Llama")
    handle = recompute_modules(other, example.recomputed)
    manager = offload_modules(other, example.offloaded, activations=True, activation_min_bytes=64)
    found = train(other, example.inputs(), manager)
    assert_same(found, expected)
    manager.close()
    handle.remove()


MISTAKES = [
    (["layer.*"], {}, ValueError, r"'layer\.\*', which matches none of model\.layers"),
    ([], {}, ValueError, "expected at least one pattern, got none"),
    ("model.layers.*", {}, TypeError, r"expected a list of patterns, got 'model\.layers\.\*'"),
    (
        ["model.layers.*", "model.layers.*.mlp"],
        {},
        ValueError,
        r"got model\.layers\.0 and model\.layers\.0\.mlp inside",
    ),
    (["model.layers.*"], {"num_prefetch_layers": -1}, ValueError, "num_prefetch_layers"),
]


@pytest.mark.parametrize(("modules", "settings", "kind", "message"), MISTAKES)
def test_mistakes_are_named(modules, settings, kind, message):
    with pytest.raises(kind, match=message):
        offload_modules(build("Llama"), modules, **settings)


def test_a_function_is_no_model():
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module, got function"):
        offload_modules(lambda x: x, ["blocks.*"])
