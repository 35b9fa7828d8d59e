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

from jax_impl.traced_programs import CALLS

opaque_call_p = Primitive("opaque_call")
opaque_call_p.multiple_results = True


def without_residuals(function: Callable[..., Any], saves_results: bool = False) -> Callable[..., Any]:
    """Return a function that keeps only its arguments for backward.

    Args:
        function: function of pytrees of arrays. It is evaluated again in backward.
        saves_results: False: except_opaque_calls refuses the results.
    """

    @jax.custom_vjp
    def call(*args: Any) -> Any:
        return opaque_call(function, *args, saves_results=saves_results)

    def forward(*args: Any) -> tuple[Any, tuple]:
        return opaque_call(function, *args, saves_results=saves_results), args

    def backward(args: tuple, cotangents: Any) -> Any:
        return jax.tree.map(_in_memory_of, args, jax.vjp(function, *args)[1](cotangents))

    call.defvjp(forward, backward)
    return call


def except_opaque_calls(primitive: Any, *operands: Any, **params: Any) -> bool:
    """Decide as a policy of jax.checkpoint that everything is saved but the results of opaque calls.

    Complex values are not saved either: a compiled jax.checkpoint cannot save them (JAX 0.10 rounds residuals
    with reduce_precision, which takes real numbers only).
    """
    if primitive is opaque_call_p:
        return params["saves_results"]
    dtypes = [x.dtype for x in operands if hasattr(x, "dtype")] + [params.get("new_dtype") or bool]
    is_complex = any(jnp.issubdtype(dtype, jnp.complexfloating) for dtype in dtypes)
    return not is_complex and primitive.name not in _MAKE_COMPLEX


def _in_memory_of(array: Array, gradient: Any) -> Any:
    """Return a gradient in the memory of its array: JAX makes gradients that are zero on the device."""
    space = jax.typeof(array).memory_space
    return jax.device_put(gradient, space) if space == jax.memory.Space.Host else gradient


_MAKE_COMPLEX = ("complex", "fft", "eig")
"""Operations that make complex values of real ones."""


def opaque_call(function: Callable[..., Any], *args: Any, saves_results: bool = False) -> Any:
    """Return ``function(*args)``, computed by one primitive.

    Args:
        function: function of pytrees of arrays.
        args: its arguments.
        saves_results: what except_opaque_calls says of the results.

    Raises:
        NotImplementedError: the function reads an array of a surrounding transformation that is no argument, or has
            ordered callbacks.
    """
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    reject_ordered_callbacks(program)
    if any(isinstance(constant, jax.core.Tracer) for constant in program.consts):  # pyright: ignore[reportAttributeAccessIssue]
        raise NotImplementedError(
            "recompute_modules: expected a submodule that reads its Variables and arguments only, got one that reads "
            "an array of a surrounding transformation; pass that array as an argument"
        )
    results = opaque_call_p.bind(*jax.tree.leaves(args), program=program, saves_results=saves_results)
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def reject_ordered_callbacks(program: ClosedJaxpr) -> None:
    """Reject a program whose callbacks have an order, which a part of it would not keep.

    Raises:
        NotImplementedError: it has one.
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
    places = [0 if each else None for each in _varying(program.jaxpr, [place is not None for place in axes])]
    batched = jax.vmap(
        lambda args: jaxpr_as_fun(program)(*args),
        in_axes=([*axes],),
        out_axes=places,
        axis_size=axis.size,
        spmd_axis_name=axis.spmd_name,
    )
    return opaque_call(batched, [*args], saves_results=saves_results), places


def _varying(program: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Return for each result of a program whether it depends on an argument that does.

    Args:
        program: the program.
        inputs: whether its arguments do.
    """
    varies = dict(zip(program.invars, inputs, strict=True))

    def read(atom: Any) -> bool:
        return not isinstance(atom, Literal) and varies.get(atom, False)

    for equation in program.eqns:
        operands = [*map(read, equation.invars)]
        inner = [*jaxprs_in_params(equation.params)]
        if equation.primitive.name in CALLS and len(inner) == 1:
            found = _varying(inner[0], operands)
        else:
            found = [any(operands)] * len(equation.outvars)
        varies.update(zip(equation.outvars, found, strict=True))
    return [*map(read, program.outvars)]


def _differentiate(primals: Any, tangents: Any, *, program: ClosedJaxpr, saves_results: bool) -> tuple[Any, Any]:
    return jax.jvp(jaxpr_as_fun(program), (*primals,), (*map(ad.instantiate_zeros, tangents),))


mlir.register_lowering(opaque_call_p, mlir.lower_fun(_run, multiple_results=True))
batching.fancy_primitive_batchers[opaque_call_p] = _batch
ad.primitive_jvps[opaque_call_p] = _differentiate
