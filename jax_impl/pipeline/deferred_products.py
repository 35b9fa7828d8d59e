"""The split of any backward into I and W: matrix products that only gradients of parameters need are left to W.

The backward is traced once. Every operation that the gradient of the input needs belongs to I. If the gradient of a
parameter needs a further matrix product or convolution, its remaining operations belong to W. The other gradients are
also computed in I, because a result such as the gradient of a bias is smaller than its operands. I saves the values of
I that W reads.

Under shard_map, values that W reads back vary over all mesh axes, and an operation that was traced for a value equal on
some devices, such as the indices of a sort, would refuse them. Values equal on some devices are therefore not saved: W
computes them from the task where that is possible; otherwise I also runs the operations that read them.

Operations inside a scan, a loop or a recomputed block are not separated: all run in I if I needs one of them.
"""

from collections.abc import Callable, Set
from typing import Any

import jax
from jax import Array
from jax.extend.core import jaxprs_in_params

from diptych_kernels.mesh_axes import varying_axes
from jax_impl.pipeline.programs import Task
from jax_impl.traced_programs import part_of, trace_inlined, variables

_PRODUCTS = ("dot_general", "conv_general_dilated", "ragged_dot", "ragged_dot_general")


class DeferredProducts:
    """The two parts of a backward.

    Args:
        backward: function of the task and further arguments that returns ``(results, gradients)``: a pytree that I must
            return, and the gradients of the parameters by name.
        task: the task, which W gets again. Values computed from a state that may change are among the residuals.
        others: the further arguments; only I has them.
    """

    def __init__(self, backward: Callable[..., tuple[Any, dict[str, Array]]], task: Task, *others: Any) -> None:
        traced = trace_inlined(backward, task, *others)
        results, gradients = jax.eval_shape(backward, task, *others)
        program = traced.jaxpr
        self._results = jax.tree.structure(results)
        self._names = [*sorted(gradients)]  # the order of the leaves of a dict
        num_results = self._results.num_leaves
        outputs = program.outvars[num_results:]
        in_first = _needed(program, variables(program.outvars[:num_results]))
        deferred = []
        for name, output in zip(self._names, outputs, strict=True):
            needed = _needed(program, variables([output]))
            if any(_has_product(program.eqns[i]) for i in needed - in_first):
                deferred.append(name)
            else:
                in_first |= needed
        self._now = [name for name in self._names if name not in deferred]
        self._later = deferred
        by_name = dict(zip(self._names, outputs, strict=True))
        outputs = [by_name[name] for name in deferred]
        in_rest = _in_rest(program, in_first, outputs, len(jax.tree.leaves(task)))
        self._split(traced, sorted(in_rest), outputs, task)
        first_outputs = [*program.outvars[:num_results], *(by_name[name] for name in self._now), *self._saved]
        equations = [equation for i, equation in enumerate(program.eqns) if i in in_first]
        self._first = part_of(program, equations, [*program.constvars, *program.invars], first_outputs)
        self._consts = traced.consts
        self.operands = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in self._saved]
        """Shapes of the values that I saves for W."""

    def run_first(self, task: Task, *others: Any) -> tuple[tuple[Any, dict[str, Array]], list[Array]]:
        """Run I: return the results with the gradients that are not deferred, and the operands of the others."""
        values = self._first(*self._consts, *jax.tree.leaves((task, *others)))
        results = values[: self._results.num_leaves]
        values = values[self._results.num_leaves :]
        gradients = dict(zip(self._now, values, strict=False))
        return (jax.tree.unflatten(self._results, results), gradients), values[len(self._now) :]

    def run_rest(self, task: Task, operands: list[Array]) -> dict[str, Array]:
        """Run W: return the deferred gradients."""
        of_task = jax.tree.leaves(task)
        read = [of_task[i] for i in self._read_of_task]
        return dict(zip(self._later, self._rest(*self._consts, *read, *operands), strict=True))

    def _split(self, traced: Any, indices: list[int], outputs: list[Any], task: Task) -> None:
        """Make W from the equations with some indices."""
        program = traced.jaxpr
        equations = [program.eqns[i] for i in indices]
        own = {v for equation in equations for v in equation.outvars}
        read = [v for atoms in ([e.invars for e in equations] + [outputs]) for v in variables(atoms) if v not in own]
        read = [v for v in dict.fromkeys(read) if v not in program.constvars]
        self._read_of_task = [i for i in range(len(jax.tree.leaves(task))) if program.invars[i] in read]
        available = [program.invars[i] for i in self._read_of_task]
        self._saved = [v for v in read if v not in available]
        self._rest = part_of(program, equations, [*program.constvars, *available, *self._saved], outputs)


def _in_rest(program: Any, in_first: set[int], outputs: list[Any], num_of_task: int) -> set[int]:
    """Return the indices of the equations that W runs; add to ``in_first`` those that I must run in addition."""
    atoms = [*program.invars, *(v for equation in program.eqns for v in equation.outvars)]
    all_axes = frozenset().union(*(varying_axes(v.aval) for v in atoms))
    equal = {v for v in atoms if varying_axes(v.aval) != all_axes}  # on some devices
    known = equal.intersection(program.invars[:num_of_task])
    from_task = set()
    for index, equation in enumerate(program.eqns):
        if known.union(program.constvars).issuperset(variables(equation.invars)) and equal.issuperset(equation.outvars):
            known.update(equation.outvars)
            from_task.add(index)
    while True:
        in_rest = _needed(program, variables(outputs), in_first - from_task)
        computed = {v for i in in_rest for v in program.eqns[i].outvars}
        refused = equal - known - computed
        readers = [program.eqns[i] for i in in_rest if not refused.isdisjoint(variables(program.eqns[i].invars))]
        if not readers:
            return in_rest
        in_first |= _needed(program, [v for equation in readers for v in equation.outvars])


def _needed(program: Any, outputs: list[Any], without: Set[int] = frozenset()) -> set[int]:
    """Return the indices of equations that lead to some variables, except ``without`` and equations only it needs."""
    read = set(outputs)
    needed = set()
    for index in reversed(range(len(program.eqns))):
        equation = program.eqns[index]
        if index not in without and not read.isdisjoint(equation.outvars):
            needed.add(index)
            read.update(variables(equation.invars))
    return needed


def _has_product(equation: Any) -> bool:
    """Return True if an equation is or contains a matrix product or a convolution."""
    if equation.primitive.name in _PRODUCTS:
        return True
    return any(_has_product(inner) for program in jaxprs_in_params(equation.params) for inner in program.eqns)
