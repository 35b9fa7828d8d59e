"""Backward in two parts, inputs first and weights later: the gradients of one backward, and no work twice."""

import re
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from diptych.plans.config import TransformerConfig
from diptych.plans.schedule.messages import PipelineError
from parity.compare import relative_difference
from parity.tolerances import GRADIENT
from reference_torch.pipeline import DeferredWeightGradients, custom_backward
from reference_torch.stage import PipelineStage
from tests.pipeline.support import divided


class Tied(torch.nn.Module):
    """One weight used three times, as it is, cast, and through a view of the input; one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(6, 6)
        self.frozen = torch.nn.Linear(6, 6)
        self.frozen.weight.requires_grad_(False)
        self.unused_bias = torch.nn.Linear(6, 6)
        self.unused_bias.bias.requires_grad_(False)

    def forward(self, x):
        y = self.first(x).tanh()
        y = self.frozen(y).view(2, -1, 6).transpose(0, 1)
        y = Double.apply(self.first(y).sigmoid())
        y = torch.nn.functional.linear(y.to(torch.bfloat16), self.first.weight.to(torch.bfloat16)).float()
        return self.unused_bias(y)[1:]


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2.0 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2.0 * gradient


def split_gradients(model, x, function=lambda model, x: model(x), autocast=False):
    """Output, gradients of the input and of all weights after I, and after W."""
    deferred = DeferredWeightGradients()
    with deferred, torch.autocast("cpu", enabled=autocast):
        out = function(model, x)
    with deferred:
        custom_backward(out, torch.ones_like(out))
    after_inputs = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    deferred.run()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    deferred.run()  # nothing is left to do
    for name, p in model.named_parameters():
        assert p.grad is None or torch.equal(p.grad, gradients[name])
        p.grad = None
    return out, after_inputs, gradients


def whole_gradients(model, x, function=lambda model, x: model(x), autocast=False):
    with torch.autocast("cpu", enabled=autocast):
        out = function(model, x)
    out.backward(torch.ones_like(out))
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    for p in model.parameters():
        p.grad = None
    return out, gradients


def recomputed(model, x):
    return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)


def deep():
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3, bias=False))


class Inner(torch.nn.Module):
    """A force: forward itself takes a gradient, with or without a graph for another."""

    def __init__(self, create_graph: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.create_graph = create_graph
        self.map, self.energy = torch.nn.Linear(6, 6), torch.nn.Linear(6, 1)

    def forward(self, x):
        y = x.detach().requires_grad_()
        energy = self.energy(self.map(y).tanh()).sum()
        (force,) = torch.autograd.grad(energy, y, create_graph=self.create_graph)
        return x + force + self.map(x)


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_gradient_that_forward_takes_is_not_deferred(create_graph):
    model, x = Inner(create_graph), torch.randn(4, 6, requires_grad=True)
    _, gradients = whole_gradients(model, x)
    _, _, split = split_gradients(model, x)
    assert split.keys() == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(split[key], gradient, msg=key)


def test_a_weight_from_another_stage_gets_its_gradient_at_once():
    weight, x = torch.randn(6, 6, requires_grad=True), torch.randn(4, 6)
    deferred = DeferredWeightGradients()
    with deferred:
        out = torch.nn.functional.linear(x, weight)
    with deferred:
        custom_backward(out, torch.ones_like(out))
    torch.testing.assert_close(weight.grad, torch.ones(6, 4) @ x)


class Products(torch.nn.Module):
    """Products written as GPT-2 and others write them; each name that ends in weight is a weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        for name in ("addmm", "operator", "method", "mm"):
            setattr(self, f"{name}_weight", torch.nn.Parameter(torch.randn(6, 6)))
        self.bias = torch.nn.Parameter(torch.randn(6))

    def forward(self, x):
        y = torch.addmm(self.bias, x.view(-1, 6), self.addmm_weight).view(x.shape).tanh()
        y = (y @ self.operator_weight).sigmoid().matmul(self.method_weight)
        return torch.mm(y.flatten(0, -2), self.mm_weight)


class Convolutions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.one = torch.nn.Conv1d(4, 8, 3, stride=2, padding=1, groups=2)
        self.two = torch.nn.Conv2d(2, 4, (3, 2), padding=(1, 0), dilation=(1, 2), bias=False)
        self.three = torch.nn.Conv3d(1, 2, 2)

    def forward(self, x):  # [2, 4, 12]
        y = self.two(self.one(x).view(2, 2, 4, 6).tanh())
        return self.three(y.view(2, 1, 4, 4, 4))


SPLIT = {
    "linear layers": (deep, (4, 6), {}),
    "one vector": (deep, (6,), {}),
    "many dimensions": (deep, (2, 3, 4, 6), {}),
    "tied, frozen, viewed and cast": (Tied, (4, 6), {}),
    "recomputed": (deep, (4, 6), {"function": recomputed}),
    "tied, recomputed": (Tied, (4, 6), {"function": recomputed}),
    "recomputed twice over": (deep, (4, 6), {"function": lambda m, x: recomputed(lambda x: recomputed(m, x), x)}),
    "autocast": (deep, (4, 6), {"autocast": True}),
    "products": (Products, (2, 3, 6), {}),
    "products, autocast": (Products, (2, 3, 6), {"autocast": True}),
    "convolutions": (Convolutions, (2, 4, 12), {}),
    "convolutions, recomputed": (Convolutions, (2, 4, 12), {"function": recomputed}),
    "convolutions, autocast": (Convolutions, (2, 4, 12), {"autocast": True}),
}


@pytest.mark.parametrize("first_stage", [True, False], ids=["first stage", "later stage"])
@pytest.mark.parametrize("name", SPLIT)
def test_inputs_first_and_weights_later_give_the_same_gradients(name, first_stage):
    make, shape, how = SPLIT[name]
    model, x = make(), torch.randn(shape, requires_grad=not first_stage)
    out, gradients = whole_gradients(model, x, **how)
    of_input, x.grad = x.grad, None
    split_out, after_inputs, split = split_gradients(model, x, **how)
    assert torch.equal(out, split_out)
    assert first_stage or torch.equal(x.grad, of_input)
    assert split.keys() == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(split[key], gradient, rtol=1e-6, atol=1e-6)
    assert not {key for key in after_inputs if key.endswith("weight")}, "a weight's gradient came with its input's"


class Uncommon(torch.nn.Module):
    """Linear layers whose weight's gradient is not one real product that nobody else looks at."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.complex = torch.nn.Linear(6, 6, bias=False, dtype=torch.complex64)
        self.vector, self.one = torch.nn.Parameter(torch.randn(6)), torch.nn.Parameter(torch.randn(1))
        self.hooked, self.halved = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.hooked.weight.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        self.halved.weight.register_post_accumulate_grad_hook(halve_gradient)

    def forward(self, x):
        linear = torch.nn.functional.linear
        y = linear(x.to(torch.complex64), self.complex.weight)
        y = y.real + linear(x, self.vector).unsqueeze(-1)
        y = torch.relu_(linear(y, self.hooked.weight)) + linear(y, self.hooked.weight, self.one)
        return self.halved(y)


def halve_gradient(parameter):
    parameter.grad.mul_(0.5)


def test_linear_layers_that_cannot_wait_give_the_same_gradients():
    model, x = Uncommon(), torch.randn(2, 3, 6, requires_grad=True)
    out, gradients = whole_gradients(model, x)
    of_input, x.grad = x.grad, None
    split_out, _, split = split_gradients(model, x)
    torch.testing.assert_close(split_out, out)
    torch.testing.assert_close(x.grad, of_input)
    assert split.keys() == gradients.keys()
    for key, gradient in gradients.items():
        torch.testing.assert_close(split[key], gradient, msg=key)


class Foreign(torch.nn.Module):
    """Products into given memory, and linear layers in transforms of torch.func."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.map = torch.nn.Linear(6, 6)
        self.register_buffer("table", torch.eye(6))

    def forward(self, x):
        scale = torch.mm(self.table, self.table, out=torch.empty(6, 6)).diagonal()
        bias = torch.addmm(self.table, self.table, self.table, out=torch.empty(6, 6))[0]
        y = torch.vmap(self.map)(self.map(x) * scale + bias)
        return y + torch.func.jacrev(lambda row: self.map(row).tanh())(x[0].detach()).sum(0)


def test_what_a_transform_or_given_memory_computes_is_not_split():
    model, x = Foreign(), torch.randn(4, 6)
    out, gradients = whole_gradients(model, x)
    split_out, _, split = split_gradients(model, x)
    torch.testing.assert_close(split_out, out)
    for key, gradient in gradients.items():
        torch.testing.assert_close(split[key], gradient, msg=key)


def test_an_input_that_changes_between_inputs_and_weights_is_refused():
    """A data iterator that fills one buffer again; autograd looks at versions no later than I."""
    model, x = deep(), torch.randn(4, 6)
    deferred = DeferredWeightGradients()
    with deferred:
        out = model(x)
    with deferred:
        custom_backward(out, torch.ones_like(out))
    x.add_(1.0)
    with pytest.raises(PipelineError, match=r"input of a linear layer, \[4, 6\], unchanged from I to W, .*yield new"):
        deferred.run()


def stage_of(**changes) -> tuple[PipelineStage, TransformerConfig]:
    config = replace(divided(2, "zb-h1", hidden_dropout=0.0), **changes)
    return PipelineStage(config, pre_process=True, post_process=False, pp_rank=0), config


STAGES = {
    "plain": {"enable_hyper_connections": False},
    "biases": {"add_bias_linear": True},
    "mhc recomputed": {"recompute_granularity": "selective", "recompute_modules": ("mhc",)},
    "layers recomputed": {"recompute_granularity": "full", "recompute_method": "uniform"},
    "mlp and activation recomputed": {"recompute_granularity": "selective", "recompute_modules": ("mlp", "core_attn")},
    "bf16": {"params_dtype": "float32", "bf16": True},
}


@pytest.mark.parametrize("name", STAGES)
def test_weights_of_a_stage_wait_for_w(name):
    """Every linear layer's weight, and nothing else."""
    stage, config = stage_of(**STAGES[name])
    tokens = torch.arange(12).view(2, 6)
    _, gradients = whole_gradients(stage, tokens)
    _, after_inputs, split = split_gradients(stage, tokens)
    linear = {key for key in gradients if re.search(r"linear_\w+\.weight$", key)}
    assert len(linear) == 8
    assert after_inputs.keys() == gradients.keys() - linear
    for key, gradient in gradients.items():
        assert relative_difference(split[key].numpy(), gradient.numpy()) <= GRADIENT[config.compute_dtype], key


@pytest.mark.parametrize("hyper", [False, True], ids=["plain", "mhc"])
def test_split_backward_does_no_work_twice(hyper):
    """FLOPs of I and W together, against B, at a width of 512."""
    stage, _ = stage_of(
        hidden_size=512, num_layers=2, seq_length=16, enable_hyper_connections=hyper, params_dtype="float32"
    )
    tokens = torch.arange(16)[None] % 24
    deferred, flops = DeferredWeightGradients(), {}
    out = stage(tokens)
    with FlopCounterMode(display=False) as counter:
        custom_backward(out, torch.ones_like(out))
    flops["B"] = counter.get_total_flops()
    with deferred:
        out = stage(tokens)
    with FlopCounterMode(display=False) as counter, deferred:
        custom_backward(out, torch.ones_like(out))
    flops["I"] = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        deferred.run()
    flops["W"] = counter.get_total_flops()
    print(flops)
    assert (flops["I"] + flops["W"]) / flops["B"] <= 1.05
    assert 0.8 <= flops["I"] / flops["W"] <= 1.25
