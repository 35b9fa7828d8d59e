"""A call that policies of jax.checkpoint see as one operation.

A policy decides for each primitive whether its results are saved for backward. Operations inside jax.jit, custom_vjp or
jax.checkpoint are decided one by one. This primitive keeps a whole function together: neither its values nor its
results are saved if the policy refuses it.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

opaque_call_p = Primitive("opaque_call")
opaque_call_p.multiple_results = True


def without_residuals(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that keeps only its arguments for backward, and whose results except_opaque_calls refuses.

    Args:
        function: function of pytrees of arrays. It is evaluated again in backward.
    """

    @jax.custom_vjp
    def call(*args: Any) -> Any:
        return opaque_call(function, *args)

    def forward(*args: Any) -> tuple[Any, tuple]:
        return opaque_call(function, *args), args

    def backward(args: tuple, cotangents: Any) -> Any:
        return jax.vjp(function, *args)[1](cotangents)

    call.defvjp(forward, backward)
    return call


def except_opaque_calls(primitive: Any, *_: Any, **__: Any) -> bool:
    """Decide as a policy of jax.checkpoint that everything is saved but the results of opaque calls."""
    return primitive is not opaque_call_p


def opaque_call(function: Callable[..., Any], *args: Any) -> Any:
    """Return ``function(*args)``, computed by one primitive.

    Args:
        function: function of pytrees of arrays.
        args: its arguments.

    Raises:
        NotImplementedError: the function reads an array of a surrounding transformation that is no argument.
    """
    leaves, structure = jax.tree.flatten(args)
    result: list[Any] = []

    def flat(*leaves: Any) -> list[Any]:
        found, treedef = jax.tree.flatten(function(*jax.tree.unflatten(structure, leaves)))
        result[:] = [treedef]
        return found

    program = jax.make_jaxpr(flat)(*leaves)
    if any(isinstance(constant, jax.core.Tracer) for constant in program.consts):  # pyright: ignore[reportAttributeAccessIssue]
        raise NotImplementedError(
            "recompute_modules: expected a submodule that reads its Variables and arguments only, got one that reads "
            "an array of a surrounding transformation; pass that array as an argument"
        )
    return jax.tree.unflatten(result[0], opaque_call_p.bind(*leaves, program=program))


@opaque_call_p.def_impl
def _run(*args: Any, program: ClosedJaxpr) -> list[Any]:
    return jaxpr_as_fun(program)(*args)


@opaque_call_p.def_abstract_eval
def _shapes(*_: Any, program: ClosedJaxpr) -> list[Any]:
    return program.out_avals


def _batch(args: Any, axes: Any, *, program: ClosedJaxpr) -> tuple[list[Any], list[int]]:
    found = opaque_call(jax.vmap(jaxpr_as_fun(program), in_axes=[*axes]), *args)
    return found, [0] * len(found)


def _differentiate(primals: Any, tangents: Any, *, program: ClosedJaxpr) -> tuple[Any, Any]:
    return jax.jvp(jaxpr_as_fun(program), (*primals,), (*map(ad.instantiate_zeros, tangents),))


mlir.register_lowering(opaque_call_p, mlir.lower_fun(_run, multiple_results=True))
batching.primitive_batchers[opaque_call_p] = _batch
ad.primitive_jvps[opaque_call_p] = _differentiate
