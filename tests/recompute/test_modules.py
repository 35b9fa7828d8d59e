"""Every mode of recompute together with every other and with what stands around it (R27).

Pipelines with freed outputs, context ranks and the project's own offload around recomputing are tested where
those are: tests/pipeline, tests/context, tests/offload, and all of them at once in tests/test_composition.py.
"""

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from diptych.plans.config.recompute import MODULE_NAMES
from diptych.plans.recompute import recompute_blocks
from reference_torch.recompute import MHCBlockRecomputeManager, lazy_restore
from tests.backends import draws_are_fixed
from tests.recompute.model_support import COMBINED, CONFIG, call, expected_gradients, model_gradients, plain, selective
from tests.recompute.support import assert_equal, is_empty, normal, reader, reference_counting_only, traced


def test_r27_modes_compute_what_the_plain_model_computes(trace):
    for name, config in COMBINED.items():
        del trace.replayed[:]
        assert_equal(model_gradients(config), expected_gradients(CONFIG))
        assert bool(trace.replayed) is (name != "full, uniform")
        assert all(region is None for region in (reference() for reference in trace.regions))


def wrapped_outside(reentrant: bool) -> Callable:
    def around(model, tokens):
        if not reentrant:
            return torch_checkpoint(model, tokens, use_reentrant=False)
        anchor = torch.zeros((), requires_grad=True)
        return torch_checkpoint(lambda anchor: model(tokens) + anchor, anchor, use_reentrant=True)

    return around


def wrapped_inside(model, tokens):
    """Attention of every layer in torch's own checkpoint, within the scope of the block."""
    for layer in model.decoder.layers.values():
        attention = layer.self_attention
        layer.self_attention.forward = functools.partial(
            lambda forward, *args: torch_checkpoint(forward, *args, use_reentrant=False), attention.forward
        )
    return model(tokens)


def offloaded(model, tokens):
    with save_on_cpu():
        return model(tokens)


def copied(model, tokens):
    """Every value kept is a copy, with the strides of the original."""

    def pack(t):
        return torch.empty(0, dtype=t.dtype).set_(t.untyped_storage().clone(), t.storage_offset(), t.shape, t.stride())

    with saved_tensors_hooks(pack, lambda t: t):
        return model(tokens)


def offloaded_inside(model, tokens):
    """Each layer norm's readers under save_on_cpu, within the scope of the block."""
    for layer in model.decoder.layers.values():
        attention = layer.self_attention

        def forward(*args, forward=attention.forward):
            with save_on_cpu():
                return forward(*args)

        attention.forward = forward
    return model(tokens)


MIXED = ("mhc, layernorm, activation", "all", "norm and MLP", "full, then activation function")
AROUND: dict[str, Callable] = {
    "torch checkpoint outside": wrapped_outside(False),
    "reentrant torch checkpoint outside": wrapped_outside(True),
    "torch checkpoint inside": wrapped_inside,
    "save_on_cpu outside": offloaded,
    "copies outside": copied,
    "save_on_cpu inside": offloaded_inside,
}


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(
    "name", ["mhc, layernorm, activation", "all", "norm and MLP", "full, then activation function"]
)
def test_r27_with_other_hooks_around_and_inside(name, around):
    assert_equal(model_gradients(COMBINED[name], AROUND[around]), expected_gradients(CONFIG))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", ["region in checkpoint", "checkpoint in region", "checkpoint reads region"])
def test_r27_torch_checkpoint_and_native_dropout(where, reentrant, refill):
    def inner(x):
        return F.dropout(x.tanh(), 0.4) * torch.rand(4, 4, dtype=x.dtype)

    def wrap(x):
        return torch_checkpoint(inner, x, use_reentrant=reentrant)

    def run(recompute: bool):
        torch.manual_seed(3)
        x, manager = normal(0, 4, 4), MHCBlockRecomputeManager()
        if where == "region in checkpoint":

            def whole(x):
                with MHCBlockRecomputeManager() as manager:
                    y = manager.checkpoint(inner, x) if recompute else inner(x)
                    z = y * y.sin()
                    manager.discard_all_outputs_and_register_unified_recompute(z)
                return z

            loss = torch_checkpoint(whole, x * 1, use_reentrant=reentrant)
        else:
            with manager:
                run_ = manager.checkpoint if recompute else call
                if where == "checkpoint in region":
                    y = run_(wrap, x * 1)
                    loss = y * y.sin()
                else:
                    y = run_(inner, x * 1)
                    loss = wrap(y) * y
                manager.discard_all_outputs_and_register_unified_recompute(loss)
            assert is_empty(y) is recompute
        torch.rand(3)
        x_grad = torch.zeros_like(x)
        x.register_hook(x_grad.add_)
        loss.backward(normal(1, *loss.shape, grad=False))
        return [x.grad]

    if reentrant and where == "checkpoint in region":
        pytest.skip("a reentrant checkpoint runs a backward of its own, which a replay cannot stand in for")
    assert_equal(run(True), run(False))


@pytest.mark.parametrize("reentrant", [True, False])
def test_r27_nothing_is_discarded_in_the_recompute_of_a_torch_checkpoint(reentrant):
    x, empty = normal(0, 4, 4), []

    def whole(x):
        with MHCBlockRecomputeManager() as manager:
            y = manager.checkpoint(F.gelu, x)
            z = reader(y)
            manager.discard_all_outputs_and_register_unified_recompute(z)
        empty.append(is_empty(y))
        return z

    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        loss = torch_checkpoint(whole, x, use_reentrant=reentrant)
    loss.backward(normal(1, *loss.shape, grad=False))
    assert empty == [not reentrant, False]
    assert_equal([x.grad], torch.autograd.grad(reader(F.gelu(x)), x, normal(1, *loss.shape, grad=False)))


@pytest.mark.parametrize("manager_is_outside", [False, True])
def test_r27_torch_checkpoint_recomputes_as_many_values_as_forward_saved(manager_is_outside):
    """Its recompute counts saved values, so a reader of a view must find its slot whether or not the output is held.

    All values have one shape, so PyTorch cannot notice a value more or less.
    """

    def part(x, weight, run):
        view = run(lambda x: x.tanh().view(-1).view(6, 6), x).view(-1).view(6, 6)  # the output itself is gone
        return ((view @ weight).sin() * view) @ weight

    def block(x, weight):
        with MHCBlockRecomputeManager() as manager:
            z = part(x, weight, manager.checkpoint)
            manager.discard_all_outputs_and_register_unified_recompute(z)
        return z

    def block_of_checkpointed_parts(x, weight):
        manager = MHCBlockRecomputeManager()

        def recomputed(x, weight):
            with lazy_restore():
                return part(x, weight, manager.checkpoint)

        z = torch_checkpoint(recomputed, x, weight, use_reentrant=False)
        manager.discard_all_outputs_and_register_unified_recompute(z)
        return z

    def gradients(function):
        x, weight = normal(0, 6, 6), normal(1, 6, 6)
        return torch.autograd.grad(function(x, weight).pow(2).sum(), (x, weight))

    def checkpointed_block(x, weight):
        return torch_checkpoint(block, x, weight, use_reentrant=False)

    run = block_of_checkpointed_parts if manager_is_outside else checkpointed_block
    assert_equal(gradients(run), gradients(lambda x, weight: part(x, weight, call)))


drawn: Counter = Counter()
models = st.fixed_dictionaries(
    {
        "num_layers": st.integers(1, 4),
        "enable_hyper_connections": st.sampled_from([True, True, False]),
        "layer_pattern": st.sampled_from(["attention", "attention+gelu", "attention", "attention+no-mlp-hc"]),
        "dtype": st.sampled_from(["float32", "float64", "bf16", "autocast"]),
        "modules": st.lists(st.sampled_from(MODULE_NAMES), unique=True, min_size=1),
        "length": st.integers(1, 4) | st.none(),
        "activation_layers": st.integers(-1, 4) | st.none(),
        "add_bias_linear": st.booleans(),
        "seed": st.integers(0, 99),
        "step": st.integers(0, 9),
    }
)


def check_model(draw: dict) -> None:
    modules = [m for m in draw["modules"] if m != "mhc" or draw["enable_hyper_connections"]]
    activation = draw["activation_layers"] is None or draw["activation_layers"] >= 0
    if activation and "activation" in modules:
        modules.remove("activation")
    if not modules and not activation:
        return
    layers, hyper = draw["num_layers"], draw["enable_hyper_connections"]
    pattern = draw["layer_pattern"] if hyper else draw["layer_pattern"].replace("+no-mlp-hc", "")
    config = selective(
        replace(
            CONFIG,
            hidden_size=8,
            num_layers=layers,
            enable_hyper_connections=hyper,
            num_residual_streams=2,
            sinkhorn_iterations=2,
            layer_pattern=pattern,
            add_bias_linear=draw["add_bias_linear"],
            params_dtype="float64" if draw["dtype"] == "float64" else "float32",
            bf16=draw["dtype"] == "bf16",
            seed=draw["seed"],
        ),
        *modules,
        recompute_activation_function=activation,
        recompute_activation_function_num_layers=min(draw["activation_layers"], layers)
        if activation and draw["activation_layers"] is not None
        else None,
        mhc_recompute_layer_num=min(draw["length"], layers) if draw["length"] and "mhc" in modules else None,
    )

    def around(model, tokens):
        with torch.autocast("cpu", torch.bfloat16, enabled=draw["dtype"] == "autocast"):
            return model(tokens, step=draw["step"])

    with traced() as trace, reference_counting_only():
        actual = model_gradients(config, around)
        assert trace.alive == []
    expected = model_gradients(plain(config), around)
    assert_equal(actual, expected)
    drawn["replayed"] += bool(trace.replayed)
    drawn[draw["dtype"]] += bool(trace.replayed)
    drawn["gelu" if "gelu" in pattern else "swiglu"] += 1
    drawn["several blocks"] += "mhc" in modules and len(recompute_blocks(config)) > 1
    drawn["several layers a block"] += any(len(planned.layers) > 1 for planned in recompute_blocks(config))
    drawn["without mHC"] += not hyper
    drawn["activation function"] += activation
    drawn["norm and MLP"] += {"layernorm", "mlp"} <= set(modules)


@pytest.mark.thorough
def test_r27_any_subset_of_modules_has_the_gradients_of_the_plain_model():
    drawn.clear()
    every = {"num_layers": 4, "enable_hyper_connections": True, "layer_pattern": "attention", "modules": MODULE_NAMES}
    every |= {"length": 3, "activation_layers": -1, "add_bias_linear": True, "seed": 1, "step": 2}

    @given(models)
    @settings(max_examples=3 * settings.default.max_examples)
    @example({**every, "dtype": "float64"})
    @example({**every, "dtype": "autocast"})
    @example({**every, "dtype": "bf16"})
    def check(draw):
        check_model(draw)

    check()
    if draws_are_fixed():
        hard = ("replayed", "float32", "float64", "bf16", "autocast", "gelu", "swiglu", "several blocks")
        hard += ("several layers a block", "without mHC", "activation function", "norm and MLP")
        assert all(drawn[case] >= 3 for case in hard), drawn
