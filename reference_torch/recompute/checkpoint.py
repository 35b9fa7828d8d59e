"""Calls whose output is not kept: one, several with one owner, and the scope that restores on first use."""

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from reference_torch.recompute import internals
from reference_torch.recompute.guards import RecomputeUsageError
from reference_torch.recompute.internals import outside_compiled_graphs
from reference_torch.recompute.region import Region, Slot, in_replay, slot_address, slot_of


class CheckpointWithoutOutput:
    """One call whose internals and output are dropped after forward, and computed again in backward.

    After :meth:`checkpoint`, run what reads the output; then discard it, naming a later tensor whose gradient
    arrives before the output is needed::

        checkpoint = CheckpointWithoutOutput()
        inner = checkpoint.checkpoint(torch.nn.functional.gelu, x)
        y = linear(inner)
        checkpoint.discard_output_and_register_recompute(y)

    Inside ``with lazy_restore():`` whoever saved the output restores it on first use, in whatever order; outside,
    the same holds for what the hook tensor was computed from. Gradients are those of the plain call, bit for bit.

    An output is kept, not discarded, where its memory is not the call's own to give away: an input, a parameter, a
    view of either, something stashed elsewhere, a tensor subclass, or one that needs no gradient
    (:attr:`kept` says which and why). It also stays where, at the discard, somebody holds it who would not restore
    it before reading: a view, or an operation under saved-tensor hooks of its own. With gradients disabled, or a
    module in eval mode, the call is a plain call.

    Args:
        name: for error messages; None: the function's own.
        generators: random generators besides PyTorch's default ones that the call draws from.
    """

    def __init__(self, name: str | None = None, generators: Sequence[torch.Generator] = ()) -> None:
        self._name, self._generators = name, tuple(generators)
        self._called = False
        self._region: Region | None = None
        self._slots: list[Slot] = []
        self._outputs: list[weakref.ref[Tensor]] = []
        self.kept: list[str] = []

    @property
    def called(self) -> bool:
        """Whether checkpoint() has returned."""
        return self._called

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """The tensors the call returned, those still alive."""
        return tuple(tensor for tensor in (reference() for reference in self._outputs) if tensor is not None)

    @outside_compiled_graphs
    def checkpoint(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """``fn(*args, **kwargs)``, to be replayed in backward.

        Args:
            fn: does the same each time it is called; changes no input. Random draws are replayed.
            args, kwargs: anything; tensors may stand in nested tuples, lists and dicts.

        Returns:
            What fn returns.

        Raises:
            RecomputeUsageError: this object has made its call already, or fn changes an input in place.
            NotImplementedError: inside a torch.func transform.
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
        leaves = tree_leaves(output)
        self._slots, self.kept = region.make_slots(leaves)
        if region.is_nested:  # nobody may hold this object, but readers must see what they saw in forward
            for slot in self._slots:
                slot.live_with_outputs()
        self._outputs = [weakref.ref(leaf) for leaf in leaves if isinstance(leaf, Tensor)]
        self._region, self._called = region, True
        return output

    @outside_compiled_graphs
    def discard_output(self) -> None:
        """Empty the output's memory, to be followed by a hook on :meth:`recompute`.

        Inside lazy_restore no hook is needed, and an output stays whose holder would not restore it before reading.

        Raises:
            RecomputeUsageError: an output was modified in place since the call.
        """
        for slot in self._slots:
            slot.discard(force=not lazy_restore.is_active())

    @outside_compiled_graphs
    def recompute(self, grad: Tensor | None = None) -> None:
        """Restore the output now; a second time does nothing. Can be registered as a tensor hook.

        Args:
            grad: ignored; what a hook is given.
        """
        slots, self._slots, self._region = self._slots, [], None
        for slot in slots:
            slot.restore()

    @outside_compiled_graphs
    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Empty the output's memory, and restore it when the gradient of ``hook_tensor`` arrives, or before.

        Args:
            hook_tensor: computed from the output, e.g. what the module returns.

        Raises:
            TypeError: it is no tensor.
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
    """The same with MindSpeed's second argument."""

    @outside_compiled_graphs
    def checkpoint(self, fn: Callable[..., Any], distribute_saved_activations: bool, *args: Any, **kwargs: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """See CheckpointWithoutOutput.checkpoint.

        Args:
            fn, args, kwargs: the call.
            distribute_saved_activations: must be False.

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
    """Several calls that are discarded together, and replayed in forward order.

    Used as a context around a block's forward, every reader in the block restores on first use, and outputs
    can be discarded as soon as their last forward reader has run (:meth:`discard_consumed`)::

        for block in blocks:  # of a few layers each
            with MHCBlockRecomputeManager() as manager:
                for layer in block:
                    streams = layer(streams, manager)
                    manager.discard_consumed(streams)
                manager.discard_all_outputs_and_register_unified_recompute(streams)

    Make a manager for each block: in backward all values of a block are resident at once, so one manager around all
    layers raises the peak instead of lowering it.

    Without the context, ``hook_tensor`` must be what the block really returns: what it was computed from is found by
    walking its graph, and its gradient triggers the unified recompute.
    """

    def __init__(self) -> None:
        self.checkpoints: list[CheckpointWithoutOutput] = []
        self._pending: list[Slot] = []
        self._scope: lazy_restore | None = None
        self._finished = False

    @outside_compiled_graphs
    def add_checkpoint(self, ckpt: CheckpointWithoutOutput) -> None:
        """Take over a checkpoint whose call has been made, in forward order.

        Raises:
            TypeError: it is no CheckpointWithoutOutput.
            ValueError: its checkpoint() was not called.
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
        """``fn(*args, **kwargs)`` in a new CheckpointWithoutOutput of this manager.

        Raises:
            RecomputeUsageError: the manager has already discarded its outputs.
        """
        if in_replay():  # an outer checkpoint makes its calls again, and keeps what they give
            return CheckpointWithoutOutput().checkpoint(fn, *args, **kwargs)
        self._check_unfinished()
        ckpt = CheckpointWithoutOutput()
        output = ckpt.checkpoint(fn, *args, **kwargs)
        self.add_checkpoint(ckpt)
        return output

    @outside_compiled_graphs
    def discard_consumed(self, *keep: Tensor) -> None:
        """Empty every output so far but those given, which forward still reads. Inside the context only.

        Raises:
            RecomputeUsageError: outside the context; or an output was modified in place.
        """
        if self._scope is None:
            raise RecomputeUsageError(
                "discard_consumed: expected to be called inside `with manager:`, where readers restore on first use"
            )
        kept = {slot_address(tensor) for tensor in keep}
        for slot in self._pending:
            if slot.address not in kept:
                slot.discard()
        self._pending = [slot for slot in self._pending if slot.address in kept]

    @outside_compiled_graphs
    def discard_all_outputs_and_register_unified_recompute(self, hook_tensor: Tensor) -> None:
        """Empty every output but the hook tensor's own memory; all are restored when its gradient arrives, or before.

        Inside the context no hook is needed: readers restore what they read, no earlier than they read it.

        Args:
            hook_tensor: what the block returns.

        Raises:
            TypeError: it is no tensor.
            RecomputeUsageError: called a second time; or an output was modified in place.
        """
        _check_hook_tensor(hook_tensor)
        self._check_unfinished()
        self._finished = True
        regions = [ckpt._region for ckpt in self.checkpoints if ckpt._region is not None]
        if self._scope is None and regions:
            _restore_readers_on_first_use(hook_tensor, regions[0])
            if hook_tensor.requires_grad:
                hook_tensor.register_hook(self._unified_recompute_hook)
        kept = slot_of(hook_tensor)
        for slot in self._pending:
            if slot is not kept:
                slot.discard()
        if kept is not None and (kept in self._pending or in_replay()):
            kept.keep()
        self._pending = []
        if self._scope is not None:  # readers hold what they need; a caller's closure may hold this object
            self.checkpoints = []

    @outside_compiled_graphs
    def _unified_recompute_hook(self, grad: Tensor) -> None:
        checkpoints, self.checkpoints = self.checkpoints, []  # a second firing finds none
        for ckpt in checkpoints:
            ckpt.recompute()

    def _check_unfinished(self) -> None:
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
        self._scope = lazy_restore()
        self._scope.__enter__()
        return self

    @outside_compiled_graphs
    def __exit__(self, *exception: Any) -> None:
        scope, self._scope = self._scope, None
        if scope is not None:
            scope.__exit__(*exception)
        if exception[0] is not None:  # nothing half-made stays behind
            self.checkpoints, self._pending, self._finished = [], [], True


class lazy_restore:
    """Every operation whose forward runs inside restores discarded outputs on first use in backward.

    One around a model's forward is enough. Hooks that were active outside (offload, an outer checkpoint) still get
    every tensor that is not a discarded output.
    """

    @staticmethod
    def is_active() -> bool:
        """Whether operations that run now restore on first use."""
        return getattr(_scopes, "depth", 0) > 0

    @staticmethod
    def is_alone(hooks: tuple[Callable, Callable] | None) -> bool:
        """Whether saved-tensor hooks are none, or this context's with none outside: nobody else keeps or drops."""
        return hooks is None or (isinstance(hooks[0], _Keep) and hooks[0].outer is None)

    @outside_compiled_graphs
    def __enter__(self) -> "lazy_restore":
        if getattr(self, "_hooks", None) is not None:
            raise RecomputeUsageError("lazy_restore: expected a context that is not entered yet, got it entered again")
        self._hooks = None
        _scopes.depth = getattr(_scopes, "depth", 0) + 1
        if torch.is_grad_enabled():
            self._hooks = saved_tensors_hooks(_Keep(internals.outer_saved_tensor_hooks()), _take)
            self._hooks.__enter__()
        return self

    @outside_compiled_graphs
    def __exit__(self, *exception: Any) -> None:
        _scopes.depth -= 1
        hooks, self._hooks = self._hooks, None
        if hooks is not None:
            hooks.__exit__(*exception)


_scopes = threading.local()
"""Its ``depth`` is the number of lazy_restore contexts this thread is in."""


class _Saved:
    """A value an operation keeps for backward, with what is needed to take it out again."""

    __slots__ = ("slot", "tensor", "unpack", "version")

    def __init__(self, tensor: Any, version: int, slot: Slot | None, unpack: Callable | None) -> None:
        self.tensor, self.version, self.slot, self.unpack = tensor, version, slot, unpack


class _Keep:
    """Pack hook of the scope; ``outer`` is the pair of hooks active outside, if any."""

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
        # Detached: a saved output that held its own graph node would be a cycle.
        return _Saved(tensor.detach() if tensor.grad_fn is not None else tensor, tensor._version, None, None)


@outside_compiled_graphs
def _take(saved: _Saved) -> Tensor:
    if saved.unpack is not None:
        return saved.unpack(saved.tensor)
    if saved.slot is not None:
        saved.slot.restore()
    if saved.tensor._version != saved.version:  # PyTorch leaves this check to the hooks
        raise RecomputeUsageError(
            "backward: expected values kept for backward unchanged, got one modified in place (one of the variables "
            f"needed for gradient computation is at version {saved.tensor._version}; expected version {saved.version})"
        )
    return saved.tensor


def _restore_readers_on_first_use(hook_tensor: Tensor, first: Region) -> None:
    """Outside a scope: turn what the hook tensor's ancestors keep, back to a region, into restoring values."""
    oldest, keep = first.node._sequence_nr(), _Keep(None)
    waiting, seen = [hook_tensor.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node._sequence_nr() < oldest:
            continue
        seen.add(node)
        waiting.extend(following for following, _ in node.next_functions)
        with internals.without_dispatch_modes():
            for attribute in dir(type(node)):
                if attribute.startswith("_raw_saved_"):
                    raw = getattr(node, attribute)
                    for value in raw if isinstance(raw, tuple) else (raw,):
                        _hook_saved(value, keep)


def _hook_saved(value: Any, keep: _Keep) -> None:
    try:
        value.register_hooks(keep, _take)
    except RuntimeError as error:
        if "hooks" not in str(error) and "None" not in str(error) and "none" not in str(error):
            raise


def _check_hook_tensor(hook_tensor: Tensor) -> None:
    if not isinstance(hook_tensor, Tensor):
        raise TypeError(f"hook_tensor: expected a tensor computed from the output, got {type(hook_tensor).__name__}")


def _is_evaluating(fn: Callable) -> bool:
    module = fn if isinstance(fn, nn.Module) else getattr(fn, "__self__", None)
    return isinstance(module, nn.Module) and not module.training
