"""JAX's residual_report inside of loops and branches: what a loop keeps is kept of every iteration."""

import jax
import jax.numpy as jnp
import pytest

from jax_impl.recompute import SavedValue, name_value, residual_report

SAVE = jax.checkpoint_policies.save_only_these_names("fc1", "mlp_output")
NOTHING = jax.checkpoint_policies.nothing_saveable
WEIGHTS, X = jnp.ones((4, 8, 8), "float32"), jnp.ones((6, 8), "float32")
ALL = {"fc1": 768, "mlp_output": 768}


def layer(weight, x):
    hidden = name_value(x @ weight, "fc1")
    out = name_value(hidden * hidden, "mlp_output")
    return out * out


def unrolled(weights, x, wrap):
    for weight in weights:
        x = wrap(layer)(weight, x)
    return x


def scanned(weights, x, wrap):
    return jax.lax.scan(lambda x, weight: (wrap(layer)(weight, x), None), x, weights)[0]


def scanned_twice(weights, x, wrap):
    pairs = weights.reshape(2, 2, 8, 8)
    return jax.lax.scan(lambda x, pair: (scanned(pair, x, wrap), None), x, pairs)[0]


def scanned_whole(weights, x, wrap):
    return wrap(lambda weights, x: scanned(weights, x, lambda f: f))(weights, x)


def scanned_branches(weights, x, wrap):
    def body(x, weight):
        return jax.lax.cond(x[0, 0] > 0, lambda: wrap(layer)(weight, x), lambda: x), None

    return jax.lax.scan(body, x, weights)[0]


def looped(weights, x, wrap):
    return jax.lax.fori_loop(0, 4, lambda place, x: wrap(layer)(weights[place], x), x)


@pytest.mark.parametrize("loop", [unrolled, scanned, scanned_twice, scanned_branches, looped])
@pytest.mark.parametrize("policy", [None, SAVE, NOTHING])
def test_every_iteration_is_counted(loop, policy):
    wrap = (lambda f: f) if policy is None else lambda f: jax.checkpoint(f, policy=policy)
    report = residual_report(lambda weights, x: loop(weights, x, wrap), WEIGHTS, X)
    assert {name: value.bytes for name, value in report.items()} == ({} if policy is NOTHING else ALL)


def test_a_loop_that_is_computed_again_keeps_nothing():
    assert residual_report(lambda w, x: scanned_whole(w, x, jax.checkpoint), WEIGHTS, X) == {}
    again = residual_report(lambda w, x: scanned_whole(w, x, lambda f: f), WEIGHTS, X)
    assert again["fc1"] == SavedValue((4, 6, 8), "float32", 768)


def test_what_a_loop_reads_is_kept_once():
    """A value named outside, whether each iteration reads all of it or a slice."""

    def constant(x):
        x = name_value(x, "fc1")
        return jax.lax.scan(lambda total, _: (total + jnp.sin(x * total), None), x, length=5)[0]

    def sliced(x):
        x = name_value(x * 2, "fc1")
        return jax.lax.scan(lambda total, row: (total * jnp.sin(row), None), x[0], x)[0]

    for function in (constant, sliced):
        report = residual_report(function, X)
        assert report.get("fc1", SavedValue((), "", 192)).bytes == 192
