"""A call that policies of jax.checkpoint see as one operation.

A policy decides for each primitive whether its results are saved for backward. Operations inside jax.jit, custom_vjp or
jax.checkpoint are decided one by one. This primitive keeps a whole function together: none of its values is saved, and
its results only where the call says so.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, Primitive, jaxpr_as_fun, jaxprs_in_params
from jax.interpreters import ad, batching, mlir
from jax.interpreters.partial_eval import dce_jaxpr_consts

from jax_impl.traced_programs import CALLS

opaque_call_p = Primitive("opaque_call")
opaque_call_p.multiple_results = True


def without_residuals(function: Callable[..., Any], saves_results: bool = False) -> Callable[..., Any]:
    """Return a function that keeps only its arguments for backward.

    Args:
        function: function of pytrees of arrays. It is evaluated again in backward. Results that depend on the same
            pytrees are computed together, other results separately. Otherwise jax.custom_vjp (JAX 0.10) under
            vmap counts the gradient of an unbatched result once per sample if another argument or result is batched.
        saves_results: True: except_opaque_calls saves the results.
    """

    def call(*args: Any) -> Any:
        program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
        _reject_what_is_outside(program)
        leaves = jax.tree.leaves(args)
        found: dict[int, Any] = {}
        for operands, results, part in _parts(program, [len(jax.tree.leaves(arg)) for arg in args]):
            values = _with_arguments_alone(part, saves_results)(*[leaves[place] for place in operands])
            found |= zip(results, values, strict=True)
        return jax.tree.unflatten(jax.tree.structure(shapes), [found[place] for place in range(len(found))])

    return call


def _with_arguments_alone(function: Callable[..., Any], saves_results: bool) -> Callable[..., Any]:
    """Return a function of arrays as an opaque call that keeps only its arguments for backward."""

    @jax.custom_vjp
    def call(*args: Any) -> Any:
        return opaque_call(function, *args, saves_results=saves_results)

    def forward(*args: Any) -> tuple[Any, tuple]:
        return opaque_call(function, *args, saves_results=saves_results), args

    def backward(args: tuple, cotangents: Any) -> Any:
        return jax.tree.map(_in_memory_of, args, jax.vjp(function, *args)[1](cotangents))

    call.defvjp(forward, backward)
    return call


def _parts(program: ClosedJaxpr, sizes: Sequence[int]) -> Sequence[tuple[Sequence[int], Sequence[int], Callable]]:
    """Divide a program into one part for each set of arguments on which a real or complex result depends.

    Args:
        program: the program.
        sizes: number of leaves of each of the original arguments.

    Returns:
        For each part the indices of its arguments and of its results, and its function. The program stays one part if
        it has effects such as callbacks, or if the parts together would be more than twice as long as the program.
    """
    jaxpr = program.jaxpr
    whole = [(range(len(jaxpr.invars)), range(len(jaxpr.outvars)), jaxpr_as_fun(program))]
    inexact = [jnp.issubdtype(result.aval.dtype, jnp.inexact) for result in jaxpr.outvars]
    if sum(inexact) < 2 or program.effects:
        return whole
    owners = [number for number, size in enumerate(sizes) for _ in range(size)]
    depends = [frozenset(owners[i] for i in _part(program, [place])[0]) for place in range(len(inexact))]
    keys = sorted({on for on, is_inexact in zip(depends, inexact, strict=True) if is_inexact}, key=len)
    groups: dict[frozenset[int], list[int]] = {key: [] for key in keys}
    for place, on in enumerate(depends):
        # integers have no gradient, so they join a part that reads their arguments anyway, if there is one
        groups[on if inexact[place] else next((key for key in keys if on <= key), keys[-1])].append(place)
    found = [(results, *_part(program, results)) for results in groups.values()]
    if len(keys) < 2 or sum(_length(part.jaxpr) for *_, part in found) > 2 * _length(jaxpr):
        return whole
    return [(read, results, jaxpr_as_fun(part)) for results, read, part in found]


def _part(program: ClosedJaxpr, results: Sequence[int]) -> tuple[list[int], ClosedJaxpr]:
    """Return the indices of the arguments on which some results depend, and the program of these results."""
    is_read = [place in results for place in range(len(program.jaxpr.outvars))]
    part, consts, inputs = dce_jaxpr_consts(program.jaxpr, is_read)
    constants = [value for value, is_const_read in zip(program.consts, consts, strict=True) if is_const_read]
    return [place for place, is_input in enumerate(inputs) if is_input], ClosedJaxpr(part, constants)


def _length(program: Jaxpr) -> int:
    """Return the number of operations of a program."""
    inner = [sum(map(_length, jaxprs_in_params(equation.params))) for equation in program.eqns]
    return sum(max(1, number) for number in inner)


def except_opaque_calls(primitive: Any, *operands: Any, **params: Any) -> bool:
    """Save everything except the results of opaque calls without saves_results; a policy of jax.checkpoint.

    Complex values are not saved either: a compiled jax.checkpoint cannot save them (JAX 0.10 rounds residuals
    with reduce_precision, which takes real numbers only).
    """
    if primitive is opaque_call_p:
        return params["saves_results"]
    dtypes = [x.dtype for x in operands if hasattr(x, "dtype")] + [params.get("new_dtype") or bool]
    is_complex = any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes)
    return not is_complex and primitive.name not in _MAKE_COMPLEX


def _in_memory_of(array: Array, gradient: Any) -> Any:
    """Return a gradient in the memory space of its array, because JAX makes zero gradients on the device."""
    space = jax.typeof(array).memory_space
    return jax.device_put(gradient, space) if space == jax.memory.Space.Host else gradient


_MAKE_COMPLEX = ("complex", "fft", "eig")
"""Operations with complex results of real operands."""


def opaque_call(function: Callable[..., Any], *args: Any, saves_results: bool = False) -> Any:
    """Return ``function(*args)``, computed by one primitive.

    Args:
        function: function of pytrees of arrays.
        args: its arguments.
        saves_results: True: except_opaque_calls saves the results.

    Raises:
        NotImplementedError: the function reads an array of a surrounding transformation that is no argument, or has
            ordered callbacks.
    """
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    _reject_what_is_outside(program)
    results = opaque_call_p.bind(*jax.tree.leaves(args), program=program, saves_results=saves_results)
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _reject_what_is_outside(program: ClosedJaxpr) -> None:
    """Reject a program with ordered callbacks, or with arrays of a transformation around it that are no arguments."""
    reject_ordered_callbacks(program)
    if any(isinstance(constant, jax.core.Tracer) for constant in program.consts):  # pyright: ignore[reportAttributeAccessIssue]
        raise NotImplementedError(
            "recompute_modules: expected a submodule that reads its Variables and arguments only, got one that reads "
            "an array of a surrounding transformation; pass that array as an argument"
        )


def reject_ordered_callbacks(program: ClosedJaxpr) -> None:
    """Reject a program with ordered callbacks, because parts of the program would not keep their order.

    Raises:
        NotImplementedError: the program has an ordered callback.
    """
    if any(type(effect).__name__.startswith("Ordered") for effect in program.effects):
        raise NotImplementedError(
            "recompute_modules, offload_modules: expected a submodule without ordered callbacks, got one with "
            "ordered=True; leave that out"
        )


@opaque_call_p.def_impl
def _run(*args: Any, program: ClosedJaxpr, saves_results: bool) -> list[Any]:
    return jaxpr_as_fun(program)(*args)


@opaque_call_p.def_abstract_eval
def _shapes(*_: Any, program: ClosedJaxpr, saves_results: bool) -> list[Any]:
    return program.out_avals


def _batch(axis: Any, args: Any, axes: Any, *, program: ClosedJaxpr, saves_results: bool) -> tuple[list, list]:
    if any(getattr(effect, "name", None) == axis.name for effect in program.effects):
        raise NotImplementedError(
            f"recompute_modules: expected a submodule without collectives over the axis of a vmap, got one over "
            f"{axis.name!r}; leave it out of the chosen ones, or use shard_map"
        )
    if all(place is None for place in axes):
        return opaque_call_p.bind(*args, program=program, saves_results=saves_results), [None] * len(program.out_avals)
    varying = _depends(program.jaxpr, [frozenset() if place is None else frozenset([0]) for place in axes])
    has_gradient = [jnp.issubdtype(aval.dtype, jnp.inexact) for aval in program.out_avals]
    places = [0 if each or real else None for each, real in zip(varying, has_gradient, strict=True)]
    batched = jax.vmap(
        lambda args: jaxpr_as_fun(program)(*args),
        in_axes=([*axes],),
        out_axes=places,
        axis_size=axis.size,
        spmd_axis_name=axis.spmd_name,
    )
    return opaque_call(batched, [*args], saves_results=saves_results), places


def _depends(program: Jaxpr, inputs: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """Return for each result of a program the numbers of the arguments that it depends on.

    Args:
        program: the program.
        inputs: numbers of its arguments, of which several may have the same.
    """
    found = dict(zip(program.invars, inputs, strict=True))

    def read(atom: Any) -> frozenset[int]:
        return frozenset() if isinstance(atom, Literal) else found.get(atom, frozenset())

    for equation in program.eqns:
        operands = [*map(read, equation.invars)]
        inner = [*jaxprs_in_params(equation.params)]
        if equation.primitive.name in CALLS and len(inner) == 1:
            results = _depends(inner[0], operands)
        else:
            results = [frozenset().union(*operands)] * len(equation.outvars)
        found.update(zip(equation.outvars, results, strict=True))
    return [*map(read, program.outvars)]


def _differentiate(primals: Any, tangents: Any, *, program: ClosedJaxpr, saves_results: bool) -> tuple[Any, Any]:
    return jax.jvp(jaxpr_as_fun(program), (*primals,), (*map(ad.instantiate_zeros, tangents),))


mlir.register_lowering(opaque_call_p, mlir.lower_fun(_run, multiple_results=True))
batching.fancy_primitive_batchers[opaque_call_p] = _batch
ad.primitive_jvps[opaque_call_p] = _differentiate
