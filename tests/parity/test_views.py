"""Views for notebooks, and the fixture of pytest."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import parity
import parity.testing
from parity import DifferenceError, side_by_side, sweep

X = np.random.default_rng(0).standard_normal((2, 3, 4))


def torch_power(x, exponent):
    return {"power": x.abs() ** exponent, "sign": x.sign()}


def jax_power(x, exponent):
    return {"power": jnp.abs(x) ** exponent, "sign": jnp.sign(x)}


def test_both_results_side_by_side():
    view = side_by_side(torch_power, jax_power, {"x": X}, static={"exponent": 2.0})
    view.check()
    assert [axis.get_title() for axis in view.figure.axes[:3]] == [
        "PyTorch: power", "JAX: power", "difference in ulps of float32",
    ]  # fmt: skip
    images = [axis.images[0].get_array() for axis in view.figure.axes if axis.images]
    np.testing.assert_allclose(images[0], np.float32(X.reshape(6, 4)) ** 2, rtol=1e-6)
    assert re.match(r'<img src="data:image/png;base64,\w.*"><pre.*>equal: all', view._repr_html_())


def test_a_difference_is_shown_in_ulps():
    view = side_by_side(torch.tanh, lambda x: jnp.tanh(x) * (1 + 2**-20), [X])
    ulps = view.figure.axes[2].images[0].get_array()
    assert 4 < ulps.max() < 17  # 8 ulps of the largest element, rounded on both sides
    assert "DIFFERENT" in view._repr_html_()
    with pytest.raises(DifferenceError):
        view.check()


def test_sliders_compute_anew():
    view = side_by_side(torch_power, jax_power, {"x": X}, sliders={"exponent": (2.0, 3.0)})
    first = view._repr_html_()
    view.update(exponent=3.0)
    assert view._repr_html_() != first
    assert view._widget("exponent").max == 3.0
    with pytest.raises(ValueError, match="update: expected values of exponent sliders, got 'x'"):
        view.update(x=1.0)
    with pytest.raises(ValueError, match=r"sliders\['exponent'\]: expected \(lowest, highest\)"):
        side_by_side(torch_power, jax_power, {"x": X}, sliders={"exponent": (3.0, 2.0)})


def test_errors_against_a_size():
    view = sweep(
        lambda x: x.sum(-1), lambda x: jnp.sum(x, -1), lambda n: [np.random.default_rng(n).random((3, n))], [4, 64, 256]
    )
    view.check()
    exact, single, half = view.figure.axes
    assert [axis.get_title() for axis in (exact, single, half)] == ["float64", "float32", "bfloat16"]
    drawn = single.lines[0].get_ydata()
    assert list(drawn) == [max(row.torch_error for row in r.rows if row.dtype == "float32") for r in view.reports]
    assert 1e-9 < max(drawn) < 1e-6
    with pytest.raises(ValueError, match="sizes: expected at least one size"):
        sweep(torch.sin, jnp.sin, lambda n: [np.ones(n)], [])


def test_errors_against_a_depth():
    def deep(library, x, depth):
        for _ in range(depth):
            x = library.tanh(2 * x)
        return x

    view = sweep(
        lambda x, depth: deep(torch, x, depth),
        lambda x, depth: deep(jnp, x, depth),
        lambda _: [X],
        [1, 8],
        static=lambda depth: {"depth": depth},
        dtypes=["float64"],
    )
    view.check()


def test_the_fixture_reports_and_seeds(pytester):
    pytester.makeconftest('pytest_plugins = ["parity.testing"]')
    pytester.makepyfile(
        """
        import jax.numpy as jnp, torch
        from parity.testing import normal

        def test_equal(equivalence):
            assert equivalence(torch.sin, jnp.sin, [normal((3,))]).is_equal

        def test_different(equivalence):
            equivalence(torch.sin, jnp.tanh, [normal((3,))])
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:randomly")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["*comparison of PyTorch and JAX*", "DIFFERENT:*"])


def test_the_public_names_are_at_most_fifteen_and_typed():
    names = [*parity.__all__, *parity.testing.__all__]
    assert len(names) == len(set(names)) == 15
    for name in names:
        public = getattr(parity if name in parity.__all__ else parity.testing, name)
        assert public.__doc__
