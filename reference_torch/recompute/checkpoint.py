"""Checkpoints that also discard their output.

The file contains a checkpoint of one call, a manager of several calls, and the context in which readers restore
discarded outputs on first use.
"""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from reference_torch.recompute import internals
from reference_torch.recompute.guards import RecomputeUsageError
from reference_torch.recompute.internals import outside_compiled_graphs
from reference_torch.recompute.region import Region, Slot, in_replay, slot_address, slot_of


class CheckpointWithoutOutput:
    """One call whose intermediate values and output are dropped after forward and recomputed in backward.

    Call :meth:`checkpoint`, then the operations that read the output, then discard the output. The discard names a
    later tensor, whose gradient arrives before backward needs the output::

        checkpoint = CheckpointWithoutOutput()
        inner = checkpoint.checkpoint(torch.nn.functional.gelu, x)
        y = linear(inner)
        checkpoint.discard_output_and_register_recompute(y)

    Inside ``with lazy_restore():`` each operation that saved the output restores it on first use, in any order.
    Outside, the operations between the output and the hook tensor do the same. Gradients are bitwise equal to those of
    the plain call.

    An output is not discarded if the call does not own its memory: an input, a parameter, a view of either, a tensor
    stored elsewhere, a tensor subclass, or a tensor that needs no gradient. :attr:`retained` lists these outputs with
    the reason. An output also stays if, at the discard, a holder exists that cannot restore it before reading: a view,
    or an operation under other saved-tensor hooks. With gradients disabled, or a module in eval mode, the call is a
    plain call.

    Args:
        name: name in error messages; None: the name of the function.
        generators: random generators that the call draws from, besides PyTorch's default generators.
    """

    def __init__(self, name: str | None = None, generators: Sequence[torch.Generator] = ()) -> None:
        self._name = name
        self._generators = tuple(generators)
        self._called = False
        self._region: Region | None = None
        self._slots: list[Slot] = []
        self._outputs: list[weakref.ref[Tensor]] = []
        self.retained: list[str] = []

    @property
    def called(self) -> bool:
        """True once checkpoint() has returned."""
        return self._called

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The tensors that the call returned and that are still alive."""
        return tuple(tensor for tensor in (reference() for reference in self._outputs) if tensor is not None)

    @outside_compiled_graphs
    def checkpoint(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``fn(*args, **kwargs)`` and replay the call in backward.

        Args:
            fn: deterministic function that changes no input. Its random draws are repeated in the replay.
            args: positional arguments; tensors may be nested in tuples, lists and dicts.
            kwargs: keyword arguments, likewise.

        Returns:
            The result of fn.

        Raises:
            RecomputeUsageError: this object has made its call already, or fn changes an input in place.
            NotImplementedError: the call runs inside a torch.func transform.
        """
        if self._region is not None or self._called:
            raise RecomputeUsageError(
                "checkpoint: expected one call per CheckpointWithoutOutput, got a second; make a new object for it"
            )
        if internals.runs_in_func_transform():
            raise NotImplementedError(
                "checkpoint: expected plain reverse-mode autograd, got a torch.func transform (grad, vmap, jvp ...) or "
                "forward-mode differentiation, whose tensors have no storage to empty; use torch.autograd.grad"
            )
        if not torch.is_grad_enabled() or _is_evaluating(fn):
            output = fn(*args, **kwargs)
            self._called = True
            return output
        name = self._name or getattr(fn, "__qualname__", type(fn).__qualname__)
        region = Region(fn, args, kwargs, name, self._generators)
        output = region.forward(args, kwargs)
        leaves = internals.leaves_of(output)
        self._slots, self.retained = region.make_slots(leaves)
        self._outputs = [weakref.ref(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        self._region = region
        self._called = True
        return output

    @outside_compiled_graphs
    def discard_output(self) -> None:
        """Release the memory of the output; the caller then registers :meth:`recompute` as a tensor hook.

        Inside lazy_restore no hook is needed, and an output stays if a holder cannot restore it before reading.

        Raises:
            RecomputeUsageError: an output was modified in place since the call.
        """
        for slot in self._slots:
            slot.discard(force=not lazy_restore.is_active())

    @outside_compiled_graphs
    def recompute(self, grad: Tensor | None = None) -> None:
        """Restore the output now; a second call does nothing.

        Args:
            grad: ignored; it allows the method to be registered as a tensor hook.
        """
        slots = self._slots
        self._slots = []
        self._region = None
        for slot in slots:
            slot.restore()

    @outside_compiled_graphs
    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Release the memory of the output and restore it at the latest when the gradient of ``hook_tensor`` arrives.

        Args:
            hook_tensor: tensor computed from the output, for example the result of the module.

        Raises:
            TypeError: hook_tensor is not a tensor.
            RecomputeUsageError: an output was modified in place since the call.
        """
        _check_hook_tensor(hook_tensor)
        if self._region is None:
            return
        _restore_readers_on_first_use(hook_tensor, self._region)
        for slot in self._slots:
            slot.discard()
        if hook_tensor.requires_grad:
            hook_tensor.register_hook(self.recompute)


class MindSpeedCheckpointWithoutOutput(CheckpointWithoutOutput):
    """A CheckpointWithoutOutput whose checkpoint() takes MindSpeed's second argument."""

    @outside_compiled_graphs
    def checkpoint(self, fn: Callable[..., Any], distribute_saved_activations: bool, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return ``fn(*args, **kwargs)`` and replay the call in backward, as CheckpointWithoutOutput.checkpoint does.

        Args:
            fn: function to call.
            distribute_saved_activations: must be False.
            args: positional arguments of fn.
            kwargs: keyword arguments of fn.

        Raises:
            NotImplementedError: distribute_saved_activations is True.
        """
        if distribute_saved_activations is not False:
            raise NotImplementedError(
                "distribute_saved_activations: expected False (inputs are not spread over tensor-parallel ranks), got "
                f"{distribute_saved_activations!r}"
            )
        return super().checkpoint(fn, *args, **kwargs)


class MHCBlockRecomputeManager:
    """Several calls that are discarded together and replayed in forward order.

    Use the manager as a context around the forward of a block. Every reader in the block then restores on first use,
    and outputs can be discarded as soon as their last forward reader has run (:meth:`discard_consumed`)::

        for block in blocks:  # of a few layers each
            with MHCBlockRecomputeManager() as manager:
                for layer in block:
                    streams = layer(streams, manager)
                    manager.discard_consumed(streams)
                manager.discard_all_outputs_and_register_unified_recompute(streams)

    Create one manager for each block. In backward all values of a block are resident at once, so one manager around
    all layers raises the peak instead of lowering it.

    Without the context, ``hook_tensor`` must be the tensor that the block returns: its graph is searched for readers of
    the outputs, and its gradient triggers the unified recompute.
    """

    def __init__(self) -> None:
        self.checkpoints: list[CheckpointWithoutOutput] = []
        self._pending: list[Slot] = []
        self._scope: lazy_restore | None = None
        self._finished = False

    @outside_compiled_graphs
    def add_checkpoint(self, ckpt: CheckpointWithoutOutput) -> None:
        """Add a checkpoint whose call has been made; add checkpoints in forward order.

        Args:
            ckpt: the checkpoint.

        Raises:
            TypeError: ckpt is not a CheckpointWithoutOutput.
            ValueError: the checkpoint() method of ckpt was not called.
            RecomputeUsageError: the manager has already discarded its outputs.
        """
        if not isinstance(ckpt, CheckpointWithoutOutput):
            raise TypeError(f"ckpt: expected a CheckpointWithoutOutput, got {type(ckpt).__name__}")
        if not ckpt.called:
            raise ValueError("ckpt: expected one whose checkpoint() was called, got a new one; call it first")
        self._check_unfinished()
        self.checkpoints.append(ckpt)
        self._pending.extend(ckpt._slots)

    @outside_compiled_graphs
    def checkpoint(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return ``fn(*args, **kwargs)``, called in a new CheckpointWithoutOutput of this manager.

        Args:
            fn: function to call, see CheckpointWithoutOutput.checkpoint.
            args: positional arguments of fn.
            kwargs: keyword arguments of fn.

        Raises:
            RecomputeUsageError: the manager has already discarded its outputs.
        """
        ckpt = CheckpointWithoutOutput()
        if self._finished and in_replay():  # an outer checkpoint replays a part of the block
            output = ckpt.checkpoint(fn, *args, **kwargs)
            for slot in ckpt._slots:
                slot.live_with_outputs()
            return output
        self._check_unfinished()
        output = ckpt.checkpoint(fn, *args, **kwargs)
        self.add_checkpoint(ckpt)
        return output

    @outside_compiled_graphs
    def discard_consumed(self, *keep: Tensor) -> None:
        """Release the memory of every output so far except ``keep``; only inside the context.

        Args:
            keep: outputs that forward still reads.

        Raises:
            RecomputeUsageError: the manager is not entered, or an output was modified in place.
        """
        if self._scope is None:
            raise RecomputeUsageError(
                "discard_consumed: expected to be called inside `with manager:`, where readers restore on first use"
            )
        retained = {slot_address(tensor) for tensor in keep}
        for slot in self._pending:
            if slot.address not in retained:
                slot.discard()
        self._pending = [slot for slot in self._pending if slot.address in retained]

    @outside_compiled_graphs
    def discard_unheld_outputs(self, is_last: bool = False) -> None:
        """Release the memory of every output so far that no Python code holds; only inside the context.

        Args:
            is_last: True at the end of the block: the other outputs stay in memory from now on.

        Raises:
            RecomputeUsageError: the manager is not entered.
        """
        if self._scope is None:
            raise RecomputeUsageError(
                "discard_unheld_outputs: expected to be called inside `with manager:`, where readers restore on first "
                "use"
            )
        remaining = []
        for slot in self._pending:
            if not slot.tensors and not slot.is_changed:
                slot.discard()
            if slot.is_full and slot.is_alive:
                remaining.append(slot)
        if is_last:
            for slot in remaining:
                slot.keep()
            self.checkpoints = []
            remaining = []
            self._finished = True
        self._pending = remaining

    @outside_compiled_graphs
    def discard_all_outputs_and_register_unified_recompute(self, hook_tensor: Tensor) -> None:
        """Release the memory of every output except the hook tensor's own.

        Outputs are restored at the latest when the gradient of the hook tensor arrives. Inside the context, each reader
        restores an output when it reads it, and no hook is registered.

        Args:
            hook_tensor: result of the block.

        Raises:
            TypeError: hook_tensor is not a tensor.
            RecomputeUsageError: the method is called a second time, or an output was modified in place.
        """
        _check_hook_tensor(hook_tensor)
        self._check_unfinished()
        self._finished = True
        regions = [ckpt._region for ckpt in self.checkpoints if ckpt._region is not None]
        if self._scope is None and regions:
            _restore_readers_on_first_use(hook_tensor, regions[0])
            if hook_tensor.requires_grad:
                hook_tensor.register_hook(self._unified_recompute_hook)
        result = slot_of(hook_tensor)
        for slot in self._pending:
            if slot is not result:
                slot.discard()
        if result is not None and result in self._pending:
            result.keep()
        self._pending = []
        if self._scope is not None:  # readers hold their slots; the manager must not prolong them
            self.checkpoints = []

    @outside_compiled_graphs
    def _unified_recompute_hook(self, grad: Tensor) -> None:
        """Restore the outputs of all checkpoints when the gradient of the hook tensor arrives."""
        checkpoints = self.checkpoints
        self.checkpoints = []  # the hook may fire twice
        for ckpt in checkpoints:
            ckpt.recompute()

    def _check_unfinished(self) -> None:
        """Raise a RecomputeUsageError if the manager has discarded its outputs."""
        if self._finished:
            raise RecomputeUsageError(
                "manager: expected one that has not yet discarded its outputs, got a used one; make a manager for each "
                "block and microbatch"
            )

    @outside_compiled_graphs
    def __enter__(self) -> "MHCBlockRecomputeManager":
        self._check_unfinished()
        if self._scope is not None:
            raise RecomputeUsageError("manager: expected a context that is not entered yet, got it entered again")
        self._scope = lazy_restore().__enter__()
        return self

    @outside_compiled_graphs
    def __exit__(self, *exception: Any) -> None:
        scope = self._scope
        self._scope = None
        if scope is not None:
            scope.__exit__(*exception)
        if exception[0] is not None:  # release the incomplete block
            self.checkpoints = []
            self._pending = []
            self._finished = True


class lazy_restore:
    """A context whose operations restore discarded outputs on first use in backward.

    One context around the forward of a model is enough. Outer saved-tensor hooks (offload, an outer checkpoint) still
    receive every tensor that is not the output of a checkpoint.

    Raises:
        NotImplementedError: on entry, where PyTorch refuses saved-tensor hooks, as inside of torch.func.grad.
    """

    @staticmethod
    def is_active() -> bool:
        """Return True if operations that run now restore on first use."""
        return getattr(_scopes, "depth", 0) > 0

    @staticmethod
    def is_alone(hooks: tuple[Callable, Callable] | None) -> bool:
        """Return True if ``hooks`` is None, or belongs to this context and no outer saved-tensor hooks are active.

        Args:
            hooks: a pair of pack and unpack hooks.
        """
        return hooks is None or (isinstance(hooks[0], _Pack) and hooks[0].outer is None)

    @outside_compiled_graphs
    def __enter__(self) -> "lazy_restore":
        if getattr(self, "_hooks", None) is not None:
            raise RecomputeUsageError("lazy_restore: expected a context that is not entered yet, got it entered again")
        hooks = None
        if torch.is_grad_enabled():
            hooks = saved_tensors_hooks(_Pack(internals.outer_saved_tensor_hooks()), _unpack)
            try:
                hooks.__enter__()
            except RuntimeError as error:
                raise NotImplementedError(
                    f"lazy_restore: expected a place that allows saved-tensor hooks, got one that does not ({error}); "
                    "use torch.autograd.grad instead of torch.func.grad and the transforms built on it"
                ) from error
        self._hooks = hooks
        _scopes.depth = getattr(_scopes, "depth", 0) + 1
        return self

    @outside_compiled_graphs
    def __exit__(self, *exception: Any) -> None:
        _scopes.depth -= 1
        hooks = self._hooks
        self._hooks = None
        if hooks is not None:
            hooks.__exit__(*exception)


_scopes = threading.local()
"""State of a thread; ``depth`` is its number of active lazy_restore contexts."""


class _Saved:
    """A value that an operation saved for backward, with its version, its slot and its outer unpack hook."""

    __slots__ = ("slot", "tensor", "unpack", "version")

    def __init__(self, tensor: Any, version: int, slot: Slot | None, unpack: Callable | None) -> None:
        self.tensor = tensor
        self.version = version
        self.slot = slot
        self.unpack = unpack


class _Pack:
    """The pack hook of lazy_restore; ``outer`` is the pair of outer hooks, if any."""

    def __init__(self, outer: tuple[Callable, Callable] | None) -> None:
        self.outer = outer

    @outside_compiled_graphs
    def __call__(self, tensor: Tensor) -> _Saved:
        slot = slot_of(tensor)
        if slot is None and self.outer is not None:
            pack, unpack = self.outer
            return _Saved(pack(tensor), 0, None, unpack)
        if slot is not None:
            return _Saved(slot.alias(tensor), tensor._version, slot, None)
        # Detach, because a saved output that held its own graph node would be a reference cycle.
        return _Saved(tensor.detach() if tensor.grad_fn is not None else tensor, tensor._version, None, None)


@outside_compiled_graphs
def _unpack(saved: _Saved) -> Tensor:
    """Return a saved value, after its slot is restored and its version is checked."""
    if saved.unpack is not None:
        return saved.unpack(saved.tensor)
    if saved.slot is not None:
        saved.slot.restore()
    if saved.tensor._version != saved.version:  # PyTorch checks versions only without hooks
        raise RecomputeUsageError(
            "backward: expected values saved for backward unchanged, got one modified in place (one of the variables "
            f"needed for gradient computation is at version {saved.tensor._version}; expected version {saved.version})"
        )
    return saved.tensor


def _restore_readers_on_first_use(hook_tensor: Tensor, first: Region) -> None:
    """Register hooks on the saved values of the hook tensor's ancestors, back to a region, that restore outputs.

    This replaces the lazy_restore context where there is none.
    """
    oldest = first.node._sequence_nr()
    pack = _Pack(None)
    pending = [hook_tensor.grad_fn]
    seen = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen or node._sequence_nr() < oldest:
            continue
        seen.add(node)
        pending.extend(following for following, _ in node.next_functions)
        with internals.without_dispatch_modes():
            for attribute in _saved_attributes(type(node)):
                raw = getattr(node, attribute)
                for value in raw if isinstance(raw, tuple) else (raw,):
                    _hook_saved(value, pack)


_attributes: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def _saved_attributes(kind: type) -> tuple[str, ...]:
    """Return the attributes of a kind of autograd node that hold its saved values."""
    if kind not in _attributes:
        _attributes[kind] = tuple(attribute for attribute in dir(kind) if attribute.startswith("_raw_saved_"))
    return _attributes[kind]


def _hook_saved(value: Any, pack: _Pack) -> None:
    """Register the hooks of lazy_restore on a saved value, unless it has hooks or is None."""
    try:
        value.register_hooks(pack, _unpack)
    except RuntimeError as error:
        if "hooks" not in str(error) and "None" not in str(error) and "none" not in str(error):
            raise


def _check_hook_tensor(hook_tensor: Tensor) -> None:
    """Raise a TypeError if the hook tensor is not a tensor."""
    if not isinstance(hook_tensor, Tensor):
        raise TypeError(f"hook_tensor: expected a tensor computed from the output, got {type(hook_tensor).__name__}")


def _is_evaluating(fn: Callable) -> bool:
    """Return True if a function is a module in eval mode or a method of one."""
    module = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    return isinstance(module, nn.Module) and not module.training
