"""Recompute of named submodules of any model, without changes to its code.

``recompute_modules`` replaces the forward of the chosen submodules, and of the blocks that contain them. Inside a
block, a chosen submodule runs in a CheckpointWithoutOutput, whose output is discarded as soon as no Python code holds
it. The mirror for JAX is ``jax_impl/recompute/modules.py``.
"""

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.batchnorm import _NormBase

from diptych.plans.module_patterns import select_within
from diptych.plans.recompute import ModuleBytes
from reference_torch.recompute import internals
from reference_torch.recompute.checkpoint import CheckpointWithoutOutput, MHCBlockRecomputeManager
from reference_torch.recompute.guards import RecomputeUsageError
from reference_torch.recompute.region import slot_at
from reference_torch.wrapped_forward import WrappedForward

SMALL_BUFFER = 2**16
"""Bytes of a buffer up to which a call always remembers its content."""
_current = threading.local()
"""State of a thread; ``manager`` belongs to the block whose forward runs, ``torch_checkpoint`` is what surrounds it."""


class RecomputedModules:
    """The recompute that recompute_modules has added to a model."""

    def __init__(self, model: nn.Module, blocks: Mapping[str, tuple[str, ...]]) -> None:
        self._model = model
        self.blocks = dict(blocks)
        """Names of the recomputed submodules by the name of their block."""
        found = dict(model.named_modules(remove_duplicate=False))
        named = [*blocks, *(name for names in blocks.values() for name in names)]
        first = {id(found[name]): name for name in reversed(named)}  # a shared module has several names
        own = [(name, found[name]) for name in named if first[id(found[name])] == name]
        self._wrapped = [(_Block if name in blocks else _Recomputed)(module, name) for name, module in own]
        for wrapped in self._wrapped:
            wrapped.install()

    def remove(self) -> None:
        """Restore the forwards of the model. A second call does nothing.

        Raises:
            RecomputeUsageError: a forward was replaced again after recompute_modules; undo that first.
        """
        for wrapped in self._wrapped:
            if not wrapped.is_installed:
                raise RecomputeUsageError(
                    f"remove: expected the forward of recompute_modules in {wrapped.name!r}, got one that replaced it "
                    "later; undo the later change first"
                )
        for wrapped in self._wrapped:
            wrapped.undo()
        self._wrapped = []

    def report(self, *inputs: Any, **options: Any) -> dict[str, ModuleBytes]:
        """Run the model twice, without and with recompute, and return the bytes that modules hold for backward.

        Parameters, buffers and inputs do not count. Gradients are not computed; afterwards, buffers such as the
        statistics of batch norms and the states of random generators are as before.

        Args:
            inputs: positional arguments of the model.
            options: keyword arguments of the model.

        Returns:
            Bytes of each chosen submodule, of each block without its chosen submodules, and of the rest of the model,
            by name; the rest has the name ``""``. The sums are the bytes of the whole model.

        Raises:
            RecomputeUsageError: recompute was removed.
        """
        if not self._wrapped:
            raise RecomputeUsageError(
                "report: expected recompute that was not removed, got removed recompute; call report before remove"
            )
        places = [*self.blocks, *(name for names in self.blocks.values() for name in names)]
        runs = []
        for is_active in (False, True):
            with _restored(self._model, inputs, options), _switched(self._wrapped, is_active):
                runs.append(_saved_bytes(self._model, places, inputs, options))
        return {name: ModuleBytes(runs[0][name], runs[1][name]) for name in runs[0]}


def recompute_modules(model: Any, modules: Any) -> RecomputedModules:
    """Make submodules drop their outputs and the values saved for backward, and recompute both in backward.

    Gradients, buffers and random numbers are bitwise equal to those of the plain model. Nothing changes in eval mode
    and with gradients disabled. Names of parameters and modules stay, and so do checkpoints, ``deepcopy`` and
    ``pickle``.

    Example::

        handle = recompute_modules(model, {"blocks.*": ["norm1", "norm2", "mlp.activation"]})

    An output stays in memory while Python code holds it: the result of the block, or what a module stores in an
    attribute. Cheap submodules that read and write memory are worth it: norms, activation functions, dropout. Choose
    blocks of one layer, or of a few: in backward all values of a block are resident at once.

    Args:
        model: any nn.Module; docs/everywhere.md lists what it can be combined with.
        modules: patterns of submodules by patterns of blocks; ``*`` stands for any text without a dot, and ``""`` for
            the whole model. A submodule is replayed in backward, so it must not change its inputs. A replay restores
            its buffers and random generators, but no other state that its forward changes.

    Returns:
        A handle: remove() undoes all changes, and report(inputs) returns bytes.

    Raises:
        TypeError: model is no module, or modules is no mapping of lists.
        ValueError: a pattern matches nothing, matches overlap, or a module has recompute already.

    Reference:
        Chen et al. 2016, https://arxiv.org/abs/1604.06174; the output is dropped as well.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("model: expected a module of Python, got a ScriptModule, whose forward cannot be replaced")
    found = dict(model.named_modules(remove_duplicate=False))
    blocks = select_within("modules", modules, [*found])
    for name in [*blocks, *(name for names in blocks.values() for name in names)]:
        if isinstance(vars(found[name]).get("forward"), _Wrapped):
            raise ValueError(
                f"modules: expected modules without recompute, got {name}, which has it; remove() it first"
            )
    _check_separate(found, blocks)
    return RecomputedModules(model, blocks)


def _check_separate(found: Mapping[str, nn.Module], blocks: Mapping[str, tuple[str, ...]]) -> None:
    """Check that no chosen submodule is part of another one under another name, which patterns do not detect."""
    chosen = {id(found[name]): name for names in [blocks, *blocks.values()] for name in names}
    for name in [name for names in blocks.values() for name in names]:
        for inner in found[name].modules():
            if inner is not found[name] and id(inner) in chosen:
                raise ValueError(
                    f"modules: expected separate submodules, got {name} and {chosen[id(inner)]}, a shared module, "
                    "which is inside it; name one of them"
                )


class _Wrapped(WrappedForward):
    """A forward that can be switched back to the plain one."""

    is_active = True

    @property
    def drops(self) -> bool:
        """True if values would be dropped now."""
        is_recording = self.is_active and self.module.training and torch.is_grad_enabled()
        return is_recording and not internals.runs_without_memory()


class _Block(_Wrapped):
    """The forward of a block: a manager is current while it runs."""

    is_divisible = True

    @internals.skipped_by_compile
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.drops:
            return self.plain(*args, **kwargs)
        outer = getattr(_current, "manager", None), getattr(_current, "torch_checkpoint", None)
        manager = MHCBlockRecomputeManager()
        try:
            with manager:
                _current.manager = manager
                _current.torch_checkpoint = internals.torch_checkpoint()
                output = self.plain(*args, **kwargs)
                manager.discard_unheld_outputs(is_last=True)
        finally:
            _current.manager, _current.torch_checkpoint = outer
        return output


class _Recomputed(_Wrapped):
    """The forward of a submodule whose values are dropped, if it runs inside a block."""

    @internals.outside_compiled_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        manager: MHCBlockRecomputeManager | None = getattr(_current, "manager", None)
        if manager is None or not self.drops:
            return self.plain(*args, **kwargs)
        if internals.torch_checkpoint() is not _current.torch_checkpoint:  # a torch.utils.checkpoint drops it
            return self.plain(*args, **kwargs)
        manager.discard_unheld_outputs()
        checkpoint = CheckpointWithoutOutput(self.name)
        output = checkpoint.checkpoint(_Call(self.module, self.plain), *args, **kwargs)
        manager.add_checkpoint(checkpoint)
        return output


class _Buffer(NamedTuple):
    """A buffer as it was before a call."""

    owner: nn.Module
    name: str
    tensor: Tensor
    version: int | None
    """None for an inference tensor, which only another tensor can replace."""
    content: Tensor
    """A copy; of an inference tensor, itself."""

    @property
    def may_be_changed(self) -> bool:
        """True unless the buffer is certainly as it was; batch norms change their statistics without a new version."""
        if self.owner._buffers.get(self.name) is not self.tensor:
            return True
        if self.version is None:
            return False
        if self.tensor._version != self.version:
            return True
        if self.tensor.layout is not torch.strided:  # every change of its values is counted
            return False
        if isinstance(self.owner, _NormBase) or self.content.nbytes <= SMALL_BUFFER:
            return True
        with _unrecorded():  # F.batch_norm on buffers of any module
            return self.tensor.is_floating_point() and not torch.equal(_read(self.tensor), self.content)

    def restore(self) -> None:
        """Give the buffer this content and version, without a write if it has both: memory may be read-only."""
        if self.tensor._version == self.version:
            changes_always = isinstance(self.owner, _NormBase) and self.owner.training
            if not changes_always and _has_bits_of(self.tensor, self.content):
                return
        _fill(self.tensor, self.content, self.version or 0)


class _Call:
    """A call of a submodule. A replay begins with the buffers of forward, and restores the present ones at its end."""

    def __init__(self, module: nn.Module, plain: Callable[..., Any]) -> None:
        self.__self__ = module
        self._plain = plain
        self._changed: list[_Buffer] | None = None
        """The buffers that forward may have changed, as they were before; None until forward has ended."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._changed is not None:
            with _as_before(self._changed):
                return self._plain(*args, **kwargs)
        before = _buffers(self.__self__)
        output = self._plain(*args, **kwargs)
        self._changed = [buffer for buffer in before if buffer.may_be_changed]
        return output


def _buffers(module: nn.Module) -> list[_Buffer]:
    """Return the buffers of a module and of its submodules."""
    owned = [(part, name, t) for part in module.modules() for name, t in part._buffers.items()]
    with _unrecorded():
        return [
            _Buffer(part, name, t, None, t)
            if t.is_inference()
            else _Buffer(part, name, t, t._version, _read(t).clone())
            for part, name, t in owned
            if t is not None
        ]


@contextmanager
def _as_before(buffers: Sequence[_Buffer]) -> Iterator[None]:
    """Give buffers their earlier content and version for a while."""
    with _unrecorded():
        own = [buffer for buffer in buffers if buffer.version is not None]
        placed = [(b, b.owner._buffers[b.name]) for b in buffers]
        present = [b._replace(content=_read(b.tensor).clone(), version=b.tensor._version) for b in own]
        for buffer in buffers:
            buffer.owner._buffers[buffer.name] = buffer.tensor
        for buffer in own:
            buffer.restore()
    try:
        yield
    finally:
        with _unrecorded():
            for buffer in present:
                buffer.restore()
            for buffer, tensor in placed:
                buffer.owner._buffers[buffer.name] = tensor


def _read(tensor: Tensor) -> Tensor:
    """Return a tensor whose elements can be read where torch functions are not handled.

    The class of an offloaded tensor fetches it first, so that class is asked, but no mode.
    """
    if type(tensor) is Tensor:
        return _without_repetition(tensor.detach())
    copied: Any = type(tensor).__torch_function__(Tensor.clone, (type(tensor),), (tensor,))
    return copied.detach()


def _without_repetition(tensor: Tensor) -> Tensor:
    """Return a view of a tensor without what expand() repeats, which PyTorch refuses to write."""
    if tensor.layout is not torch.strided or 0 not in tensor.stride():
        return tensor
    shape = [size if stride else min(size, 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(shape, tensor.stride())


def _has_bits_of(tensor: Tensor, content: Tensor) -> bool:
    """Return True if a tensor with an unchanged version certainly has this content."""
    if tensor.layout is not torch.strided:
        return True
    if type(tensor) is not Tensor or tensor.device.type != "cpu":  # a comparison would wait for a GPU
        return False
    present = _read(tensor)
    if not present.is_floating_point() or present.is_neg():
        return torch.equal(present, content)
    bits = _BITS[present.itemsize]  # a NaN is equal too
    return torch.equal(present.view(bits), content.view(bits))


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _fill(tensor: Tensor, content: Tensor, version: int) -> None:
    """Change content and version of a tensor, so that autograd and the replay's checks see the given version."""
    if tensor.layout is not torch.strided:  # another tensor would get the new elements
        tensor.copy_(content)
    elif type(tensor) is Tensor:
        _read(tensor).copy_(content)
    else:
        tensor.detach().copy_(content)
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))  # pyright: ignore[reportAttributeAccessIssue]


@contextmanager
def _unrecorded() -> Iterator[None]:
    """Run operations that neither autograd nor the recorder of a region sees."""
    with torch.no_grad(), torch._C.DisableTorchFunction():
        yield


@contextmanager
def _copied_buffers(module: nn.Module) -> Iterator[None]:
    """Give a module and its submodules copies of their buffers for a while."""
    own = [(part, name, buffer) for part in module.modules() for name, buffer in part._buffers.items()]
    copies: dict[int, Tensor] = {}
    try:
        for part, name, buffer in own:
            if buffer is not None:
                part._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())
        yield
    finally:
        for part, name, buffer in own:
            part._buffers[name] = buffer


@contextmanager
def _switched(forwards: Sequence[_Wrapped], is_active: bool) -> Iterator[None]:
    """Switch recompute on or off for a while."""
    for forward in forwards:
        forward.is_active = is_active
    try:
        yield
    finally:
        for forward in forwards:
            forward.is_active = True


@contextmanager
def _restored(model: nn.Module, inputs: Any, options: Any) -> Iterator[None]:
    """Restore buffers and the states of random generators at the end, also of those of Python and NumPy."""
    devices = {leaf.device for leaf in internals.leaves_of((inputs, options)) if isinstance(leaf, Tensor)}
    devices |= {parameter.device for parameter in model.parameters()}
    cuda = [device for device in devices if device.type == "cuda"]
    python = random.getstate()
    numpy = np.random.get_state()
    try:
        with torch.random.fork_rng(cuda), _copied_buffers(model):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def _saved_bytes(model: nn.Module, places: Sequence[str], inputs: Any, options: Any) -> dict[str, int]:
    """Return the bytes that stay allocated for backward after a forward, by the module that made them."""
    stack = [""]
    origins: dict[int, tuple[str, StorageWeakRef, int]] = {}
    """Module, weak reference and size of each storage, by address."""
    outside = [*model.parameters(), *model.buffers(), *internals.leaves_of((inputs, options))]
    excluded = {internals.storage_address(leaf) for leaf in outside if isinstance(leaf, Tensor)}

    def note(tensor: Tensor) -> Tensor:
        address = internals.storage_address(tensor)
        if address is not None and address not in excluded and address not in origins:
            storage = tensor.untyped_storage()
            origins[address] = (stack[-1], StorageWeakRef(storage), storage.nbytes())
        return tensor if tensor.grad_fn is None else tensor.detach()  # not a cycle of a node and its own output

    def note_all(tree: Any) -> None:
        for leaf in internals.leaves_of(tree):
            if isinstance(leaf, Tensor):
                note(leaf)

    def enter(name: str) -> Callable[..., None]:
        def enter_named(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            note_all((args, kwargs))  # what a module receives belongs to those around it
            stack.append(name)

        return enter_named

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        note_all(output)
        stack.pop()

    handles = []
    for name in places:
        module = model.get_submodule(name)  # a shared module has several names
        handles.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
        handles.append(module.register_forward_hook(leave, always_call=True))
    try:
        with saved_tensors_hooks(note, lambda tensor: tensor):
            output = model(*inputs, **options)
    finally:
        for handle in handles:
            handle.remove()
    returned = {internals.storage_address(t) for t in internals.leaves_of(output) if isinstance(t, Tensor)}
    found = dict.fromkeys(["", *places], 0)
    for address, (name, reference, size) in origins.items():
        slot = slot_at(address)
        is_empty = slot is not None and not slot.is_full
        if address not in returned and not is_empty and not reference.expired():
            found[name] += size
    return found
