"""Outputs that share memory with older tensors are kept; what is changed in place is refused (R7)."""

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reference_torch.recompute import (
    CheckpointWithoutOutput,
    MHCBlockRecomputeManager,
    RecomputeUsageError,
    lazy_restore,
)
from tests.recompute.support import HandsBack, assert_equal, gradients, is_empty, listed, normal, reader

OLDER = {name: normal(50 + i, 4, 4) for i, name in enumerate(("parameter", "buffer", "older"))}
STASH: list[Tensor] = []


def stashing(x: Tensor) -> Tensor:
    y = x.tanh()
    STASH.append(y.detach())
    return y


ALIASING: dict[str, Callable] = {
    "input": lambda x: x,
    "view of the input": lambda x: x.view(-1, 2),
    "transposed input": lambda x: x.t(),
    "row of the input": lambda x: x[1],
    "expanded input": lambda x: x[None].expand(3, 4, 4),
    "chunks of the input": lambda x: x.chunk(2),
    "rows of the input": lambda x: x.unbind(),
    "strided view of the input": lambda x: x.as_strided((2, 2), (4, 1)),
    "detached input": lambda x: x.detach(),
    "contiguous": lambda x: x.contiguous(),
    "same type": lambda x: x.to(torch.float64),
    "identity": nn.Identity(),
    "flatten": nn.Flatten(),
    "dropout of nothing": lambda x: F.dropout(x, 0.5, training=False),
    "parameter": lambda x: OLDER["parameter"],
    "view of a parameter": lambda x: OLDER["parameter"].t(),
    "buffer": lambda x: OLDER["buffer"].detach(),
    "older tensor": lambda x: OLDER["older"].view(2, 8),
    "function that hands its input back": lambda x: HandsBack.apply(x, x),
    "function that hands an older tensor back": lambda x: HandsBack.apply(x, OLDER["older"]),
    "stashed elsewhere": stashing,
}


@pytest.mark.parametrize("name", ALIASING)
def test_r07_output_aliasing_an_older_tensor_is_kept(name):
    call, x = ALIASING[name], normal(0, 4, 4)
    try:
        expected_outputs = listed(call(x))
        needs = [y.requires_grad for y in expected_outputs]
        read = [reader(y) for y in expected_outputs if y.requires_grad]
        inputs = [x, *OLDER.values()]
        expected = gradients(read, inputs, allow_unused=True) if any(needs) else ()
        before = [t.detach().clone() for t in inputs]

        checkpoint = CheckpointWithoutOutput("mine")
        with lazy_restore():
            outputs = listed(checkpoint.checkpoint(call, x))
            read = [reader(y) for y in outputs if y.requires_grad]
            checkpoint.discard_output()
        assert len({y.untyped_storage()._cdata for y in outputs}) == len(checkpoint.retained) == 1
        assert checkpoint.retained[0].startswith("output 0 of 'mine': ")
        assert all(type(y) in (Tensor, nn.Parameter) and not is_empty(y) for y in outputs)
        assert_equal([y.detach() for y in outputs], [y.detach() for y in expected_outputs])
        actual = gradients(read, inputs, allow_unused=True) if any(needs) else ()
        assert [a is None for a in actual] == [b is None for b in expected]
        assert_equal([a for a in actual if a is not None], [b for b in expected if b is not None])
        assert_equal([t.detach() for t in inputs], before)
    finally:
        STASH.clear()


def test_r07_only_the_aliasing_outputs_are_kept():
    def mixed(x, weight):
        return x, F.gelu(x), weight.view(-1), x.tanh().t(), x.detach() * 2

    def call(run):
        x, weight = normal(0, 4, 4), normal(1, 4, 4)
        outputs = run(mixed, x * 1, weight)
        return x, weight, outputs

    x, weight, outputs = call(lambda fn, *args: fn(*args))
    expected = gradients([reader(y) for y in outputs[:4]], [x, weight])
    checkpoint = CheckpointWithoutOutput()
    with lazy_restore():
        x, weight, outputs = call(checkpoint.checkpoint)
        read = [reader(y) for y in outputs[:4]]
        checkpoint.discard_output()
    assert [is_empty(y) for y in outputs] == [False, True, False, True, False]
    assert len(checkpoint.retained) == 3
    assert_equal(gradients(read, [x, weight]), expected)


def test_r07_an_outer_tensor_of_a_closure_is_kept():
    """An intermediate of the caller's, with a graph of its own, that the call gets by closure."""
    x = normal(0, 4, 4)
    older = x.exp()
    expected = gradients(reader((older * 1).t()) + reader(older), [x], retain_graph=True)
    checkpoint = CheckpointWithoutOutput()
    y = checkpoint.checkpoint(lambda: older)
    loss = reader((older * 1).t()) + reader(y)
    checkpoint.discard_output_and_register_recompute(loss)
    assert checkpoint.retained
    assert not is_empty(older)
    assert_equal(gradients(loss, [x]), expected)


def test_r07_a_call_that_changes_its_input_in_place_is_refused():
    x = normal(0, 3, 4)
    for change in (lambda h: h.mul_(2).sin(), lambda h: F.relu(h, inplace=True), lambda h: h[0].zero_() + h):
        checkpoint = CheckpointWithoutOutput("changes")
        with pytest.raises(RecomputeUsageError, match="'changes': expected a call that leaves its inputs as they are"):
            checkpoint.checkpoint(change, x * 1)
        assert not checkpoint.called


@pytest.mark.parametrize("scoped", [True, False])
def test_r07_an_input_changed_before_the_replay_is_refused(scoped):
    x = normal(0, 3, 4)
    h = x * 1
    checkpoint = CheckpointWithoutOutput("late")
    with lazy_restore() if scoped else contextlib.nullcontext():
        loss = reader(checkpoint.checkpoint(F.gelu, h))
        checkpoint.discard_output_and_register_recompute(loss)
    with torch.no_grad():
        h.add_(1)
    with pytest.raises(RecomputeUsageError, match=r"'late'.*got one modified in place|one modified in place"):
        gradients(loss, [x])


@pytest.mark.parametrize("through", [lambda y: y, lambda y: y.detach(), lambda y: y[1:]])
def test_r07_an_output_changed_before_its_discard_is_refused(through):
    x = normal(0, 3, 4)
    checkpoint = CheckpointWithoutOutput("early")
    y, other = checkpoint.checkpoint(lambda x: (x * 2, x.sin()), x)
    with torch.no_grad():
        through(y).mul_(2)
    with pytest.raises(RecomputeUsageError, match="output 0 of 'early': expected it as the call returned it"):
        checkpoint.discard_output()
    assert type(y) is Tensor
    checkpoint = CheckpointWithoutOutput("early")
    y, other = checkpoint.checkpoint(lambda x: (x * 2, x.sin()), x)
    loss = reader(y)
    with torch.no_grad():
        through(other).mul_(2)
    with pytest.raises(RecomputeUsageError, match="output 1 of 'early'"):
        checkpoint.discard_output_and_register_recompute(loss)


@pytest.mark.parametrize("scoped", [True, False])
def test_r07_an_output_changed_after_its_restore_is_an_error_as_in_the_plain_graph(scoped):
    x = normal(0, 3, 4)
    checkpoint = CheckpointWithoutOutput()
    with lazy_restore() if scoped else contextlib.nullcontext():
        y = checkpoint.checkpoint(F.gelu, x)
        loss = reader(y)
        checkpoint.discard_output_and_register_recompute(loss)
    gradients(loss, [x], retain_graph=True)
    with torch.no_grad():
        y.mul_(2)
    with pytest.raises(RuntimeError, match=r"modified (in place|by an inplace operation)"):
        gradients(loss, [x])


IN_PLACE: dict[str, Callable] = {
    "relu": lambda h: F.relu(h, inplace=True),
    "augmented assignment": lambda h: h.__iadd__(1),
    "view": lambda h: (h.view(-1).mul_(2), h)[1],
    "detached": lambda h: (h.detach().mul_(2), h)[1],
}


@pytest.mark.parametrize("managed", [True, False])
@pytest.mark.parametrize("name", IN_PLACE)
def test_r07_an_output_changed_in_a_function_that_has_returned_is_refused(name, managed):
    """Its Python object is gone at the discard; what saved it is not."""
    norm, linear, x = nn.LayerNorm(4).double(), nn.Linear(4, 4).double(), normal(0, 4, 4)

    def mlp(run):
        return linear(IN_PLACE[name](run(norm, x)))

    checkpoint, manager = CheckpointWithoutOutput(), MHCBlockRecomputeManager()
    y = mlp(manager.checkpoint if managed else checkpoint.checkpoint)
    owner = manager if managed else checkpoint
    discard = owner.discard_all_outputs_and_register_unified_recompute if managed else None
    with pytest.raises(RecomputeUsageError, match="expected it as the call returned it, got it modified in place"):
        (discard or checkpoint.discard_output_and_register_recompute)(y)


def test_r07_an_output_changed_while_it_was_empty_is_refused():
    x = normal(0, 4, 4)
    checkpoint = CheckpointWithoutOutput()
    y = checkpoint.checkpoint(torch.tanh, x)
    alias = y.detach()
    loss = (y * y).sum()
    checkpoint.discard_output()
    alias.zero_()
    with pytest.raises(RecomputeUsageError, match="modified in place while it was empty"):
        checkpoint.recompute()
    loss.detach_()


def conjugates(z: Tensor) -> tuple[Tensor, Tensor]:
    a = torch.exp(z)
    return a, (a * a.conj()).real


def signs(z: Tensor) -> tuple[Tensor, Tensor]:
    a = torch.exp(z).conj()
    return a.imag, a.real * a.imag


@pytest.mark.parametrize("call", [conjugates, signs, lambda z: torch.exp(z).conj(), lambda z: torch.exp(z).conj().imag])
@pytest.mark.parametrize("scoped", [True, False])
def test_r13_conjugates_and_signs_of_complex_outputs(call, scoped):
    def read(outputs):
        return sum((y * y.conj() * y).abs().sum() for y in listed(outputs))

    z = torch.randn(4, 4, dtype=torch.complex128, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected = torch.autograd.grad(read(call(z)), z)
    checkpoint = CheckpointWithoutOutput()
    with lazy_restore() if scoped else contextlib.nullcontext():
        loss = read(checkpoint.checkpoint(call, z))
        checkpoint.discard_output_and_register_recompute(loss)
    assert_equal(torch.autograd.grad(loss, z), expected)
