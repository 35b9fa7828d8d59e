"""Buffers and variables that forward changes, such as running statistics: pairs of both sides, by JAX's names."""

from collections.abc import Callable, Sequence

import numpy as np
from torch import nn

from parity.implementations import Run, TorchImplementation, Values
from parity.names import star_pattern
from parity.pytrees import Leaves

UNBIASED = 1e-3
"""Largest relative error of the number of samples that a ratio of variances tells."""


class UpdatedStates:
    """The changed buffers and variables of a pair of implementations.

    Args:
        torch: the implementation in PyTorch.
        translate: returns JAX's parameters for PyTorch's; None: no buffer has a counterpart.
        ignored: patterns of names that are not compared.
    """

    def __init__(
        self, torch: TorchImplementation, translate: Callable[[Leaves], Leaves] | None, ignored: Sequence[str]
    ) -> None:
        self.notes: list[str] = []
        self._translate = translate
        self._ignored = [star_pattern(pattern) for pattern in ignored]
        self._momenta: dict[str, float] = {}
        """Share of the batch in running variances, by JAX's name."""
        self._samples: dict[str, int] = {}
        self._names: list[str] | None = None
        """Names of what the first run has changed, so that all runs have equal rows."""
        module = torch.function
        if translate is not None and isinstance(module, nn.Module):
            for path, layer in module.named_modules():
                if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.running_var is not None:
                    name = f"{path}.running_var".removeprefix("_orig_mod.").lstrip(".")
                    found = translate({name: torch.parameters[name]}) if name in torch.parameters else {}
                    self._momenta |= dict.fromkeys(found, layer.momentum or 0.0)

    def of(self, both: tuple[Values, Values], ours: Run, theirs: Run) -> tuple[Leaves, Leaves]:
        """Return the values after forward of all states that one side has changed, of PyTorch and of JAX."""
        if self._translate is None:
            self._note([*ours.updates], [*theirs.updates])
            return {}, {}
        if self._names is None:
            linked = self._translate(both[0].parameters)
            changed = self._translate(dict(ours.updates))
            self._names = [n for n in linked if (n in changed or n in theirs.updates) and not self._is_ignored(n)]
            alone = [name for name, array in ours.updates.items() if not self._translate({name: array})]
            self._note(alone, [name for name in theirs.updates if name not in linked])
        if not self._names:
            return {}, {}
        before = self._translate(both[0].parameters)
        after = self._translate({**both[0].parameters, **ours.updates})
        second = {name: theirs.updates.get(name, both[1].parameters[name]) for name in self._names}
        batches = [array.shape[0] for array in both[0].inputs.values() if array.ndim and array.shape[0] > 1]
        first = {name: self._biased(name, before[name], after[name], second[name], batches) for name in self._names}
        return first, second

    def _is_ignored(self, name: str) -> bool:
        return any(pattern.fullmatch(name) for pattern in self._ignored)

    def _note(self, ours: Sequence[str], theirs: Sequence[str]) -> None:
        for side, names in (("PyTorch", ours), ("JAX", theirs)):
            left = [name for name in names if not self._is_ignored(name)]
            note = f"Forward of {side} changes {', '.join(left)}, which is not compared: it has no counterpart."
            if left and note not in self.notes:
                self.notes.append(note)

    def _biased(
        self, name: str, before: np.ndarray, after: np.ndarray, other: np.ndarray, batches: Sequence[int]
    ) -> np.ndarray:
        """Return a running variance of PyTorch as if it were that of flax, which does not divide by n - 1 but by n.

        The number n of samples is read off the ratio of both, which has to be equal for all channels, and n has to be a
        multiple of the first size of an input. Another factor, such as 1.1, is a difference.
        """
        if name not in self._momenta:
            return after
        retained = (1.0 - self._momenta[name]) * before
        own = after - retained
        if name not in self._samples:
            with np.errstate(divide="ignore", invalid="ignore"):
                excess = own / (other - retained) - 1.0
            count = 1.0 + 1.0 / float(np.median(excess)) if np.all(excess > 0.0) else 0.0
            number = round(count) if np.isfinite(count) else 0
            is_multiple = any(number % size == 0 for size in batches)
            is_same = number > 1 and is_multiple and bool(np.all(np.abs(excess * (number - 1) - 1.0) < UNBIASED))
            self._samples[name] = number if is_same else 0
            if is_same:
                self.notes.append(
                    f"The running variance {name} of PyTorch is unbiased, that of flax is not: compared after the "
                    f"factor {number - 1} / {number}."
                )
        number = self._samples[name]
        return retained + own * (number - 1) / number if number else after
