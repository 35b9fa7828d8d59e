"""The failing variant of notebook 02, which a process of its own runs, because it can end with a segmentation fault.

Usage: python -m parity.notebooks.recompute_hook READER HOOK
"""

import sys
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu


class Manager:
    """An early design of MHCBlockRecomputeManager: one hook on one tensor refills all storages."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[[Tensor], Tensor], Tensor, torch.UntypedStorage]] = []

    def checkpoint(self, fn: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Call a function and record how to replay it."""
        output = fn(x)
        self.calls.append((fn, x.detach(), output.untyped_storage()))
        return output

    def discard_and_register(self, hook_tensor: Tensor) -> None:
        """Empty all storages, to be refilled when the gradient of a tensor arrives."""
        for _, _, storage in self.calls:
            storage.resize_(0)
        hook_tensor.register_hook(self._refill)

    def _refill(self, gradient: Tensor) -> None:
        print("hook runs", flush=True)
        for fn, x, storage in self.calls:
            fresh = fn(x).untyped_storage()
            storage.resize_(fresh.nbytes())
            storage.copy_(fresh)


if __name__ == "__main__":
    torch.manual_seed(0)
    first = torch.nn.Linear(64, 64)
    second = torch.nn.Linear(64, 64)
    inputs = torch.randn(512, 64)
    read = {"matrix product": second, "square": torch.square}[sys.argv[1]]
    weight = second.weight if read is second else first.weight
    expected = torch.autograd.grad(read(gelu(first(inputs))).square().sum(), weight)[0]
    manager = Manager()
    hidden_states = read(manager.checkpoint(gelu, first(inputs)))
    hooked = {"hidden_states": hidden_states, "hidden_states.sum()": hidden_states.sum()}[sys.argv[2]]
    manager.discard_and_register(hooked)
    actual = torch.autograd.grad(hidden_states.square().sum(), weight)[0]
    print("gradient is right:", torch.equal(actual, expected))
