"""What wraps a call of the delta rule: torch.func, forward mode, torch.compile, tensors without values; jax's own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.backends import assert_close, backend_module
from tests.linear_attention.support import RULES, make_case

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # of torch.func
RULE = backend_module("torch", "delta_rule")


def tensors(rule: str, **changes) -> dict[str, torch.Tensor]:
    return {n: torch.from_numpy(x) for n, x in make_case(rule, length=20, **changes).arrays.items()}


TRANSFORMED = {
    "vmap": lambda f, v: torch.func.vmap(f)(torch.stack([v, v])),
    "grad": lambda f, v: torch.func.grad(lambda v: f(v).sum())(v),
    "jvp": lambda f, v: torch.func.jvp(f, (v,), (v,)),
    "forward mode": lambda f, v: _forward_mode(f, v),
}


def _forward_mode(function, v):
    with torch.autograd.forward_ad.dual_level():
        return function(torch.autograd.forward_ad.make_dual(v, v))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("transformation", TRANSFORMED)
@pytest.mark.parametrize("rule", RULES)
def test_transformations_of_torch_are_refused_by_name(rule, transformation, keep):
    """The recurrent form, which is made of PyTorch's own operations, takes them all."""
    arrays = tensors(rule)
    v = arrays.pop("v")
    message = rf"chunk_{rule}: .* without transformations .*; call recurrent_{rule}, or"
    with pytest.raises(NotImplementedError, match=message):
        TRANSFORMED[transformation](
            lambda v: getattr(RULE, f"chunk_{rule}")(v=v, **arrays, disable_recompute=keep)[0], v
        )
    offsets = torch.tensor([0, 20], dtype=torch.int32)
    TRANSFORMED[transformation](lambda v: getattr(RULE, f"recurrent_{rule}")(v=v, **arrays)[0], v)
    TRANSFORMED[transformation](lambda v: getattr(RULE, f"recurrent_{rule}")(v=v, **arrays, cu_seqlens=offsets)[0], v)


@pytest.mark.parametrize("keep", [False, True])
def test_torch_checkpoint_may_wrap_a_call(keep):
    """Its hooks give what was saved once."""
    arrays = {n: x.requires_grad_() for n, x in tensors("kda").items()}
    call = lambda v: RULE.chunk_kda(**(arrays | {"v": v}), disable_recompute=keep)[0]  # noqa: E731
    plain, wrapped = call(arrays["v"]), checkpoint(call, arrays["v"], use_reentrant=False)
    gradients = (torch.autograd.grad(x, list(arrays.values()), torch.ones_like(x)) for x in (plain, wrapped))
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_offsets_that_cannot_be_read_are_named():
    arrays, offsets = tensors("kda", state=False), torch.tensor([0, 7, 20], dtype=torch.int32)
    for form in ("chunk_kda", "recurrent_kda"):
        function = getattr(RULE, form)
        with pytest.raises(
            ValueError, match=r"cu_seqlens: expected a tensor whose values .* got one on the meta device"
        ):
            function(**{n: x.to("meta") for n, x in arrays.items()}, cu_seqlens=offsets.to("meta"))
        with pytest.raises(ValueError, match=r"cu_seqlens: expected a tensor whose values .* got one that torch.func"):
            torch.func.vmap(lambda o, function=function: function(**arrays, cu_seqlens=o)[0])(offsets[None])


@pytest.mark.parametrize("form", ["chunk", "recurrent"])
@pytest.mark.parametrize("rule", RULES)
def test_tensors_of_the_meta_device_have_shapes(rule, form):
    arrays = {n: x.to("meta").requires_grad_() for n, x in tensors(rule).items()}
    o, states = getattr(RULE, f"{form}_{rule}")(**arrays, output_final_state=True)
    assert (o.shape, states.shape) == (arrays["v"].shape, arrays["initial_state"].shape)
    gradients = torch.autograd.grad([o, states], list(arrays.values()), [o, states])
    assert [x.shape for x in gradients] == [x.shape for x in arrays.values()]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile's own
@pytest.mark.parametrize("rule", RULES)
def test_torch_compile_breaks_the_graph_and_says_why(rule):
    arrays = {n: x.requires_grad_() for n, x in tensors(rule).items()}
    offsets = torch.tensor([0, 20], dtype=torch.int32)

    def call(arrays, offsets):
        return getattr(RULE, f"chunk_{rule}")(**arrays, cu_seqlens=offsets)[0] * 2

    found = torch.compile(call, backend="eager")(arrays, offsets)
    wanted = call(arrays, offsets)
    assert torch.equal(found, wanted)
    gradients = (torch.autograd.grad(x, list(arrays.values()), wanted.detach()) for x in (found, wanted))
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))
    with pytest.raises(Exception, match="read offsets on the host; leave fullgraph=True out"):
        torch.compile(lambda arrays: call(arrays, offsets), backend="eager", fullgraph=True)(arrays)


@pytest.mark.thorough
@pytest.mark.parametrize("rule", RULES)
def test_jax_maps_a_call_and_differentiates_it_twice(rule):
    """Forward-mode differentiation is refused by JAX itself, of any function with a backward of its own."""
    arrays = make_case(rule, length=9, heads=1, key=2, width=2).arrays
    chunked, recurrent = (
        getattr(backend_module("jax", "delta_rule"), f"{form}_{rule}") for form in ("chunk", "recurrent")
    )
    two = {n: jnp.stack([x, 0.5 * x]) for n, x in arrays.items()}

    def gradient(function, **options):
        def loss(v, rest):
            return jnp.sin(function(v=v, **rest, **options)[0]).sum()

        rest = {n: x for n, x in two.items() if n != "v"}
        twice = jax.grad(lambda v, rest: jnp.sin(jax.grad(loss)(v, rest)).sum())
        return jax.jit(jax.vmap(lambda v, rest: (jax.grad(loss)(v, rest), twice(v, rest))))(two["v"], rest)

    ours, wanted = gradient(chunked, chunk_size=4), gradient(recurrent)
    assert_close([np.asarray(x) for x in ours], [np.asarray(x) for x in wanted], 1e-12)
    rest = {n: jnp.asarray(x) for n, x in arrays.items() if n != "v"}
    with pytest.raises(TypeError, match=r"forward-mode (autodiff|differentiation)"):
        jax.jvp(lambda v: chunked(v=v, **rest)[0], (jnp.asarray(arrays["v"]),), (jnp.asarray(arrays["v"]),))
