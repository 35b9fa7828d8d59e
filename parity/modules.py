"""Comparison of a module of PyTorch with a module of JAX, at equal parameters."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from parity.functions import Pair, Report
from parity.implementations import JaxImplementation, TorchImplementation, make_inputs
from parity.inspection import is_exact
from parity.names import Links, resolve
from parity.pytrees import Leaves, to_numpy
from parity.suggestions import SuggestedNames, propose_names, retargeted, settle_square, target_of

AGREEMENT = 1e-9
"""Relative difference of outputs in float64 below which a mapping of names is right."""
MAX_UNLIKELY = 8
"""Largest number of parameters for which unlikely layouts are tried."""


def compare_modules(
    torch_module: nn.Module,
    jax_module: Any,
    inputs: Any,
    *,
    names: Mapping[str, Any] | None = None,
    ignore: Iterable[str] = (),
    static: Mapping[str, Any] | None = None,
    dtypes: Any = ("float64", "float32", "bfloat16"),
    gradients: bool = True,
    seed: int = 0,
    device: str | torch.device = "cpu",
) -> Report:
    """Compare outputs, updated buffers, and the gradients of all inputs and parameters of two modules.

    PyTorch's parameters and floating buffers are copied to JAX; neither module is changed.

    Args:
        torch_module: a module of PyTorch; it may be compiled.
        jax_module: an nnx.Module, (linen module, variables), (function, parameters) with the parameters as first
            argument, or a callable pytree.
        inputs: as in compare_functions.
        names: PyTorch's names of parameters and the names of JAX; see parity.names. None: those of suggest_names.
        ignore: patterns of parameters, of either side, without counterpart; they keep their values. Changes of
            buffers and variables with these names are not compared.
        static: further keyword arguments of both modules, passed as they are.
        dtypes: names of the floating dtypes to compare in, float64 first.
        gradients: False: compare outputs only.
        seed: seed of cotangents and perturbations.
        device: device of PyTorch's tensors.

    Returns:
        A report with one row for each output and gradient in each dtype; parameters have JAX's names.

    Raises:
        ValueError: as in compare_functions, or the names do not fit the modules.
    """
    pair = pair_of_modules(torch_module, jax_module, inputs, names, ignore, static, device)
    return pair.compare(dtypes, gradients=gradients, seed=seed)


def pair_of_modules(
    torch_module: nn.Module,
    jax_module: Any,
    inputs: Any,
    names: Mapping[str, Any] | None,
    ignore: Iterable[str] = (),
    static: Mapping[str, Any] | None = None,
    device: str | torch.device = "cpu",
) -> Pair:
    """Return two modules with linked parameters; see compare_modules for arguments and errors."""
    if not isinstance(torch_module, nn.Module):
        raise ValueError(f"torch_module: expected an nn.Module, got {type(torch_module).__name__}")
    if names is not None and not isinstance(names, Mapping):
        raise ValueError(
            f"names: expected a mapping of PyTorch's names to those of JAX, got {type(names).__name__}; write "
            "{'weight': 'kernel'}"
        )
    ignore = [ignore] if isinstance(ignore, str) else list(ignore)
    call = make_inputs(inputs, static)
    ours = TorchImplementation(torch_module, call, device)
    theirs = JaxImplementation(jax_module, call)
    if not theirs.parameters and ours.parameters:
        raise ValueError("jax_module: expected a module with parameters, got none; pass (function, parameters)")
    if names is None:
        names = suggest_names(torch_module, jax_module, inputs, static)
        if names.ambiguous:
            raise ValueError(
                f"names: expected a mapping, got none, and several fit for {', '.join(names.ambiguous)}; print "
                "suggest_names(torch_module, jax_module), correct it and pass it as names"
            )
    links = resolve(names, shapes_of(ours.parameters), shapes_of(theirs.parameters), ignore, theirs.constants)
    pair = Pair(ours, theirs, call, links, ignored=ignore)
    pair.stored_narrow = _stored_narrow(torch_module, theirs, links)
    return pair


def _stored_narrow(torch_module: nn.Module, theirs: JaxImplementation, links: Links) -> list[str]:
    """Return the buffers and variables without counterpart whose values a narrower dtype than float64 has rounded."""
    used = {name for pair in links.pairs for name in pair}
    buffers = {n: to_numpy(x) for n, x in torch_module.named_buffers() if x.is_floating_point() or x.is_complex()}
    found = [f"{name} of PyTorch" for name, array in buffers.items() if name not in used and _is_rounded(array)]
    variables = {n: x for n, x in theirs.stored.items() if n not in theirs.trainable and n not in used}
    return found + [f"{name} of JAX" for name, array in variables.items() if _is_rounded(array)]


def _is_rounded(array: np.ndarray) -> bool:
    return array.dtype.itemsize <= (8 if array.dtype.kind == "c" else 4) and not is_exact(array)


def suggest_names(
    torch_module: nn.Module, jax_module: Any, inputs: Any = None, static: Mapping[str, Any] | None = None
) -> SuggestedNames:
    """Propose which parameters of two modules belong together, from shapes, order and similarity of names.

    Args:
        torch_module: a module of PyTorch.
        jax_module: a module of JAX; see compare_modules.
        inputs: None, or inputs of both modules: of the alternatives of ambiguous entries, those under which the outputs
            agree are then chosen.
        static: as in compare_modules.

    Returns:
        The mapping, which prints as a table. Entries for which another candidate fits nearly as well are marked as
        ambiguous, unless the outputs have decided.
    """
    call = make_inputs([np.zeros(1)])
    ours, theirs = (
        shapes_of(side.parameters)
        for side in (TorchImplementation(torch_module, call), JaxImplementation(jax_module, call))
    )
    found = propose_names(ours, theirs)
    if inputs is None or not (found.ambiguous or found.unlikely):
        return found

    def disagreement(names: Mapping[str, Any]) -> float:
        try:
            unmatched = (*found.unmatched_torch, *found.unmatched_jax)
            pair = pair_of_modules(torch_module, jax_module, inputs, names, unmatched, static)
            report = pair.compare(["float64"], gradients=False, seed=0)
        except ValueError:
            return float("inf")
        return max(row.difference.norm for row in report.rows)

    def improved(chosen: dict[str, Any], best: float, alternatives: Mapping[str, list[Any]]) -> tuple[dict, float]:
        for name, others in alternatives.items():
            for other in others if best >= AGREEMENT else []:
                trial = {**chosen, name: other}
                for key, value in chosen.items():
                    if key != name and target_of(value) == target_of(other):  # the two change places
                        trial[key] = retargeted(value, target_of(chosen[name]))
                smaller = disagreement(trial)
                if smaller < best:
                    chosen = trial
                    best = smaller
        return chosen, best

    likely = dict(found.names)
    likely, best = improved(likely, disagreement(likely), found.ambiguous)
    chosen, best = improved(likely, best, dict(itertools.islice(found.unlikely.items(), MAX_UNLIKELY)))
    if best < AGREEMENT:
        return replace(found, names=chosen, ambiguous={})
    return settle_square(replace(found, names=likely), ours)


def shapes_of(arrays: Leaves) -> dict[str, tuple[int, ...]]:
    """Return the shapes of arrays by name."""
    return {name: array.shape for name, array in arrays.items()}
