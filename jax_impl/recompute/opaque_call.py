"""A call that policies of jax.checkpoint see as one operation.

A policy decides for each primitive whether its results are saved for backward. Operations inside jax.jit, custom_vjp or
jax.checkpoint are decided one by one. This primitive keeps a whole function together: none of its values is saved, and
its results only where the call says so.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

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
        return jax.vjp(function, *args)[1](cotangents)

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


_MAKE_COMPLEX = ("complex", "fft", "eig")
"""Operations that make complex values of real ones."""


def opaque_call(function: Callable[..., Any], *args: Any, saves_results: bool = False) -> Any:
    """Return ``function(*args)``, computed by one primitive.

    Args:
        function: function of pytrees of arrays.
        args: its arguments.
        saves_results: what except_opaque_calls says of the results.

    Raises:
        NotImplementedError: the function reads an array of a surrounding transformation that is no argument.
    """
    program, shapes = jax.make_jaxpr(function, return_shape=True)(*args)
    if any(isinstance(constant, jax.core.Tracer) for constant in program.consts):  # pyright: ignore[reportAttributeAccessIssue]
        raise NotImplementedError(
            "recompute_modules: expected a submodule that reads its Variables and arguments only, got one that reads "
            "an array of a surrounding transformation; pass that array as an argument"
        )
    results = opaque_call_p.bind(*jax.tree.leaves(args), program=program, saves_results=saves_results)
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


@opaque_call_p.def_impl
def _run(*args: Any, program: ClosedJaxpr, saves_results: bool) -> list[Any]:
    return jaxpr_as_fun(program)(*args)


@opaque_call_p.def_abstract_eval
def _shapes(*_: Any, program: ClosedJaxpr, saves_results: bool) -> list[Any]:
    return program.out_avals


def _batch(args: Any, axes: Any, *, program: ClosedJaxpr, saves_results: bool) -> tuple[list[Any], list[int]]:
    batched = jax.vmap(jaxpr_as_fun(program), in_axes=[*axes])
    found = opaque_call(batched, *args, saves_results=saves_results)
    return found, [0] * len(found)


def _differentiate(primals: Any, tangents: Any, *, program: ClosedJaxpr, saves_results: bool) -> tuple[Any, Any]:
    return jax.jvp(jaxpr_as_fun(program), (*primals,), (*map(ad.instantiate_zeros, tangents),))


mlir.register_lowering(opaque_call_p, mlir.lower_fun(_run, multiple_results=True))
batching.primitive_batchers[opaque_call_p] = _batch
ad.primitive_jvps[opaque_call_p] = _differentiate
