"""What a checkpoint may meet: other hooks, all kinds of outputs, transforms (R12, R13)."""

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from reference_torch.recompute import CheckpointWithoutOutput, MHCBlockRecomputeManager, lazy_restore
from reference_torch.recompute.region import slot_of
from tests.recompute.support import aliases, assert_equal, gradients, is_empty, listed, normal, reader, run_process

# R12


def test_r12_hooks_outside_move_the_inputs_and_see_nothing_else(trace):
    packed = []

    def offload(tensor):
        packed.append(tensor.untyped_storage()._cdata)
        return tensor.detach().numpy().copy(), tensor.requires_grad

    def back(saved):
        return torch.from_numpy(saved[0])

    def internals_of(x, weight):
        return F.gelu((x @ weight).sin().exp()).tanh()

    x, weight = normal(0, 4, 4), normal(1, 4, 4)
    expected = gradients(reader(internals_of(x * 1, weight * 1)), [x, weight])
    checkpoint = CheckpointWithoutOutput("call")
    h, w = x * 1, weight * 1
    with saved_tensors_hooks(offload, back):
        y = checkpoint.checkpoint(internals_of, h, w)
    assert packed == [h.untyped_storage()._cdata, w.untyped_storage()._cdata]
    storages = [StorageWeakRef(t.untyped_storage()) for t in (h, w)]
    del h, w
    assert all(storage.expired() for storage in storages), "an input that was moved is held by nobody"
    loss = reader(y)
    checkpoint.discard_output_and_register_recompute(loss)
    assert is_empty(y)
    assert_equal(gradients(loss, [x, weight]), expected)
    assert trace.replayed == ["call"]


def test_r12_hooks_outside_the_scope_see_everything_but_discarded_outputs():
    log = []

    def pack(tensor):
        log.append(tensor.untyped_storage()._cdata)
        return tensor.detach().clone()

    x, other = normal(0, 4, 4), normal(1, 4, 4)
    expected = gradients(reader(F.gelu(x * 1)) * (other * 1).flatten(), [x, other])
    checkpoint = CheckpointWithoutOutput()
    with saved_tensors_hooks(pack, lambda t: t), lazy_restore():
        h, o = x * 1, other * 1
        y = checkpoint.checkpoint(F.gelu, h)
        loss = reader(y) * o.flatten()
        checkpoint.discard_output()
    assert h.untyped_storage()._cdata in log
    assert o.untyped_storage()._cdata in log
    address = slot_of(y).address
    assert address not in log
    assert is_empty(y)
    assert_equal(gradients(loss, [x, other]), expected)


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_r12_save_on_cpu(where):
    x = normal(0, 4, 4)
    expected = gradients(reader(F.gelu(x * 1)), [x])
    checkpoint = CheckpointWithoutOutput()
    save, scope = torch.autograd.graph.save_on_cpu(), lazy_restore()
    with save if where == "outside" else scope, scope if where == "outside" else save:
        y = checkpoint.checkpoint(F.gelu, x * 1)
        loss = reader(y)
        checkpoint.discard_output()
    assert is_empty(y) is (where == "outside")  # inside, the tensor itself is kept: on the CPU it need not move
    assert_equal(gradients(loss, [x]), expected)


# R13

SHAPES: dict[str, Callable] = {
    "several": lambda x: (x.tanh(), x.exp(), x.softmax(0)),
    "aliasing each other": aliases,
    "chunks of one result": lambda x: (x @ x).tanh().chunk(2),
    "rows of one result": lambda x: x.tanh().unbind(),
    "same tensor twice": lambda x: (lambda y: (y, y))(x.tanh()),
    "transposed": lambda x: (x @ x).tanh().t(),
    "every second": lambda x: x.sigmoid()[::2, ::2],
    "expanded": lambda x: x.tanh().sum(0, keepdim=True).tanh().expand(4, 4),
    "scalar": lambda x: (x.tanh() * x).sum().tanh(),
    "empty": lambda x: x[:0].tanh(),
    "empty and not": lambda x: (x[:0].tanh(), x.tanh(), x[:, :0] * 2),
    "complex": lambda x: torch.complex(x, x.sin()).exp().abs() + torch.fft.fft(x).real.tanh(),
    "half": lambda x: x.to(torch.bfloat16).tanh(),
}


@pytest.mark.parametrize("scoped", [True, False])
@pytest.mark.parametrize("name", SHAPES)
def test_r13_outputs_of_every_kind(name, scoped, refill, trace):
    call, x = SHAPES[name], normal(0, 4, 4)

    def losses(outputs):
        return [(y * y.sin()).flatten() for y in outputs] + [y.reshape(-1).exp() * y.flatten() for y in outputs]

    expected = gradients(losses(listed(call(x))), [x])
    checkpoint = CheckpointWithoutOutput()
    with lazy_restore() if scoped else contextlib.nullcontext():
        outputs = listed(checkpoint.checkpoint(call, x))
        read = losses(outputs)
        checkpoint.discard_output_and_register_recompute(torch.cat(read))
    assert [is_empty(y) for y in outputs] == [y.numel() > 0 for y in outputs]
    layout = [(y.shape, y.stride(), y.storage_offset()) for y in outputs]
    (actual,) = gradients(read, [x])
    assert torch.equal(actual, expected[0])
    if any(y.numel() for y in outputs):
        assert_equal([actual], expected)
    assert len(trace.replayed) == 1
    assert [(y.shape, y.stride(), y.storage_offset()) for y in outputs] == layout
    assert_equal([y.detach() for y in outputs], [y.detach() for y in listed(call(x))])


def test_r13_complex_and_several_consumers():
    x = normal(0, 4, 4)

    def call(x):
        return torch.fft.fft(x.tanh()).exp()

    def losses(y):
        return [torch.view_as_real(y * y.conj()), y.abs().sin(), (y @ y).real]

    expected = gradients(losses(call(x)), [x])
    checkpoint = CheckpointWithoutOutput()
    with lazy_restore():
        y = checkpoint.checkpoint(call, x)
        read = losses(y)
        checkpoint.discard_output()
    assert is_empty(y)
    assert_equal(gradients(read, [x]), expected)


class Tagged(torch.Tensor):
    """A subclass of somebody's."""


def test_r13_subclass_outputs_are_kept():
    x = normal(0, 4, 4)

    def call(x):
        return x.tanh().as_subclass(Tagged), x.sin()

    expected = gradients([o.as_subclass(Tensor) * o.as_subclass(Tensor) for o in call(x)], [x])
    checkpoint = CheckpointWithoutOutput("tags")
    with lazy_restore():
        tagged, y = checkpoint.checkpoint(call, x)
        read = [o.as_subclass(Tensor) * o.as_subclass(Tensor) for o in (tagged, y)]
        checkpoint.discard_output()
    assert checkpoint.retained == ["output 0 of 'tags': a tensor subclass"]
    assert type(tagged) is Tagged
    assert is_empty(y)
    assert torch.equal(tagged.as_subclass(Tensor), x.tanh())
    assert_equal(gradients(read, [x]), expected)


DTENSOR = """
import os
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from reference_torch.recompute import CheckpointWithoutOutput, lazy_restore
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
torch.manual_seed(0)
x, c = torch.randn(4, 4), torch.randn(4, 4)
results = []
for recompute in (False, True):
    leaf = distribute_tensor(x, mesh, [Replicate()]).requires_grad_()
    checkpoint = CheckpointWithoutOutput("sharded")
    with lazy_restore():
        y = checkpoint.checkpoint(torch.tanh, leaf) if recompute else leaf.tanh()
        loss = y * y
        if recompute:
            checkpoint.discard_output()
            assert isinstance(y, DTensor) and torch.equal(y.to_local(), x.tanh())
            assert checkpoint.retained == ["output 0 of 'sharded': a tensor subclass"], checkpoint.retained
    results.append(torch.autograd.grad(loss, leaf, distribute_tensor(c, mesh, [Replicate()]))[0].to_local())
assert torch.equal(*results)
dist.destroy_process_group()
print("kept", flush=True)
os._exit(0)  # PyTorch aborts now and then when a process ends that had gradients of DTensors, also plain ones
"""


@pytest.mark.multiprocess
@pytest.mark.skipif(not torch.distributed.is_available(), reason="needs torch.distributed")
def test_r13_dtensor_outputs_are_kept():
    assert run_process(DTENSOR) == "kept\n"


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap, torch.func.vjp, torch.func.jvp])
def test_r13_func_transforms_are_refused_by_name(transform):
    def call(x):
        return CheckpointWithoutOutput().checkpoint(torch.tanh, x).sum()

    x = normal(0, 3, grad=False)
    apply = {
        torch.func.vjp: lambda: torch.func.vjp(call, x),
        torch.func.jvp: lambda: torch.func.jvp(call, (x,), (x,)),
    }.get(transform, lambda: transform(call)(x))
    with pytest.raises(NotImplementedError, match=r"torch\.func transform"):
        apply()


@pytest.mark.parametrize("context", [lazy_restore, MHCBlockRecomputeManager])
def test_r13_contexts_inside_a_func_transform_are_refused_by_name_and_end(context):
    """PyTorch refuses saved-tensor hooks there; what could not be entered is not active afterwards."""
    entered = context()

    def call(x):
        with entered:
            return x.sin().sum()

    x = normal(0, 3, grad=False)
    with pytest.raises(NotImplementedError, match=r"lazy_restore: expected .* instead of torch\.func\.grad"):
        torch.func.grad(call)(x)
    assert not lazy_restore.is_active()
    assert call(x).isfinite()
    assert not lazy_restore.is_active()


class PassThrough(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [PassThrough, lambda: FlopCounterMode(display=False)])
@pytest.mark.parametrize("backward_inside", [True, False])
@pytest.mark.parametrize("scoped", [True, False])
def test_r13_dispatch_modes(mode, backward_inside, scoped):
    """Numbers are saved as tensors, which a mode cannot detach."""

    def read(y):
        return (y * 0.2 + y.t() * y.detach() * 0.5).sum() * 0.1

    x = normal(0, 4, 4)
    expected = gradients(read((x * 1.5).tanh() * 0.3), [x])
    with contextlib.ExitStack() as stack:
        with mode() as entered:
            checkpoint = CheckpointWithoutOutput()
            with lazy_restore() if scoped else contextlib.nullcontext():
                loss = read(checkpoint.checkpoint(lambda x: (x * 1.5).tanh() * 0.3, x))
                checkpoint.discard_output_and_register_recompute(loss)
        if backward_inside:
            stack.enter_context(mode())
        assert entered is not None
        assert_equal(gradients(loss, [x]), expected)


def test_r13_hooks_of_modules_that_insert_views_in_backward_are_no_difference():
    """As FlopCounterMode does."""
    linear, x = torch.nn.Linear(4, 4).double(), normal(0, 4, 4)
    expected = gradients(reader(linear(x * 1)), [x])
    with FlopCounterMode(display=False):
        checkpoint = CheckpointWithoutOutput()
        loss = reader(checkpoint.checkpoint(lambda x: linear(x), x * 1))
        checkpoint.discard_output_and_register_recompute(loss)
        assert_equal(gradients(loss, [x]), expected)
