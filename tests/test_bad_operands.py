"""What operations do not take is refused by name: with the same words in both backends and by the kernels."""

import inspect
import re

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from diptych_kernels import jax_backend as jax_ops
from diptych_kernels import torch_backend as torch_ops
from tests.backends import BACKENDS, backend_module

LIBRARIES = {"torch": torch_ops, "jax": jax_ops}


class Given:
    """One backend's arrays, and its functions without the annotation checks of the tests."""

    def __init__(self, backend: str, impl: str = "reference") -> None:
        self.backend, self.impl = backend, impl

    def array(self, *shape: int, dtype: str = "float32"):
        values = np.arange(int(np.prod(shape))).reshape(shape)
        if self.backend == "torch":
            return torch.from_numpy(values).to(getattr(torch, dtype))
        return jnp.asarray(values).astype(dtype)

    def state(self, *shape: int, **changes):
        rows = self.array(*shape, dtype="int64" if self.backend == "torch" else "uint32")
        return backend_module(self.backend, "ops").DropoutState(1, 2, rows, rows)._replace(**changes)

    def call(self, module: str, name: str, *args, **kwargs):
        return inspect.unwrap(getattr(backend_module(self.backend, module), name))(*args, **kwargs)

    def ops(self, name: str, *args, **kwargs):
        return self.call("ops", name, *args, **kwargs)

    def mhc(self, name: str, *args, **kwargs):
        return self.call("hyper_connections", name, *args, impl=self.impl, **kwargs)

    def dropout(self, rate, site=3, **changes):
        return self.ops("dropout", self.array(2, 3, 4), rate, self.state(2, 3, **changes), site)

    def written(self, rate=0.1, rows=(2, 3), site=0, **changes):
        streams, y, h = self.array(2, 3, 4, 8), self.array(2, 3, 8), self.array(2, 3, 4)
        return self.mhc("write_streams", streams, None, y, None, h, rate, self.state(*rows, **changes), site)

    def rows(self, samples=(2,), positions=3, seed=0, step=0, length=3, dtype="int32"):
        arrays = self.array(*samples, dtype=dtype), self.array(positions, dtype="int32")
        return self.ops("dropout_state", seed, step, *arrays, length)


RATE, WORD = r"rate: expected a number in [0, 1), got ", "expected an integer in [0, 2**32), got "
DENSE = "expected a dense array of the backend's framework, got "
OPERATIONS = {  # what is called, and what it says
    "rate 1": (lambda g: g.dropout(1.0), RATE + "1.0"),
    "rate 1.5": (lambda g: g.dropout(1.5), RATE + "1.5"),
    "negative rate": (lambda g: g.dropout(-0.5), RATE + "-0.5"),
    "rate NaN": (lambda g: g.dropout(float("nan")), RATE + "nan"),
    "rate as text": (lambda g: g.dropout("0.1"), RATE + "'0.1'"),
    "rows of another batch": (
        lambda g: g.dropout(0.5, row_low=g.array(3, 2, dtype="int32")),
        "state.row_low: expected shape (2, 3), got (3, 2)",
    ),
    "one row": (lambda g: g.dropout(0.5, row_high=g.array(1, dtype="int32")), "state.row_high: expected shape (2, 3)"),
    "rows that are no integers": (
        lambda g: g.dropout(0.5, row_high=g.array(2, 3)),
        "state.row_high: expected integers, got float32",
    ),
    "rows of numpy": (lambda g: g.dropout(0.5, row_low=np.zeros((2, 3), int)), "state.row_low: " + DENSE + "ndarray"),
    "site beyond a word": (lambda g: g.dropout(0.5, site=2**32), "site: " + WORD + "4294967296"),
    "seed below 0": (lambda g: g.dropout(0.5, seed=-1), "state.seed: " + WORD + "-1"),
    "fractional step": (lambda g: g.dropout(0.5, step=1.5), "state.step: " + WORD + "1.5"),
    "step beyond a word": (lambda g: g.rows(step=2**32), "step: " + WORD + "4294967296"),
    "seq_length beyond a word": (lambda g: g.rows(length=2**32), "seq_length: " + WORD + "4294967296"),
    "fractional samples": (lambda g: g.rows(dtype="float32"), "samples: expected integers, got float32"),
    "samples of other tokens": (lambda g: g.rows(samples=(2, 4)), "samples: expected shape (2, 3), got (2, 4)"),
    "samples of three axes": (lambda g: g.rows(samples=(2, 3, 1)), "samples: expected shape [B] or [B, T], got (2, 3"),
    "Philox's counter": (lambda g: g.ops("philox_4x32", (0, 0), (0, 2**32, 0, 0)), "counter[1]: " + WORD),
    "Philox's key": (lambda g: g.ops("philox_4x32", (0, -1), (0, 0, 0, 0)), "key[1]: " + WORD + "-1"),
    "integer dropout": (
        lambda g: g.ops("dropout", g.array(2, 3, 4, dtype="int32"), 0.5, g.state(2, 3), 0),
        "x: expected a type among float16, bfloat16, float32, float64, got int32",
    ),
    "float targets": (
        lambda g: g.ops("cross_entropy", g.array(2, 3, 5), g.array(2, 3)),
        "targets: expected integers, got float32",
    ),
    "targets' shape": (
        lambda g: g.ops("cross_entropy", g.array(2, 3, 5), g.array(2, 1, dtype="int32")),
        "targets: expected shape (2, 3), got (2, 1)",
    ),
    "logits without a batch": (
        lambda g: g.ops("cross_entropy", g.array(3, 5), g.array(3, dtype="int32")),
        "logits: expected shape [B, T, V], got (3, 5)",
    ),
    "a list": (lambda g: g.ops("linear", [[1.0]], g.array(1, 1)), "x: " + DENSE + "list"),
    "numpy": (lambda g: g.ops("linear", g.array(2, 3), np.ones((4, 3))), "weight: " + DENSE + "ndarray"),
    "linear": (lambda g: g.ops("linear", g.array(2, 3), g.array(4, 5)), "weight: expected shape (4, 3), got (4, 5)"),
    "linear's bias": (
        lambda g: g.ops("linear", g.array(2, 3), g.array(4, 3), g.array(1)),
        "bias: expected shape (4,), got (1,)",
    ),
    "bias": (lambda g: g.ops("add_bias", g.array(2, 3), g.array(1)), "bias: expected shape (3,), got (1,)"),
    "norm's weight": (
        lambda g: g.ops("rms_norm", g.array(2, 3), g.array(1), 1e-5),
        "weight: expected shape (3,), got (1,)",
    ),
    "norm's epsilon": (
        lambda g: g.ops("rms_norm", g.array(2, 3), g.array(3), float("nan")),
        "epsilon: expected a finite number of at least 0, got nan",
    ),
    "odd heads": (
        lambda g: g.ops("rotary_embedding", g.array(1, 2, 1, 3), g.array(2, dtype="int32"), 1e4),
        "x: expected heads of an even width, got 3",
    ),
    "rotary's base": (
        lambda g: g.ops("rotary_embedding", g.array(1, 2, 1, 4), g.array(2, dtype="int32"), 0),
        "base: expected a positive finite number, got 0",
    ),
    "positions": (
        lambda g: g.ops("rotary_embedding", g.array(1, 2, 1, 4), g.array(3, dtype="int32"), 1e4),
        "positions: expected shape (2,), got (3,)",
    ),
    "channels of a convolution": (
        lambda g: g.ops("short_convolution", g.array(1, 4, 3), g.array(2, 4), g.array(4, dtype="int32")),
        "weight: expected shape (3, 4), got (2, 4)",
    ),
    "no taps": (
        lambda g: g.ops("short_convolution", g.array(1, 4, 3), g.array(3, 0), g.array(4, dtype="int32")),
        "weight: expected shape (3, 1), got (3, 0)",
    ),
    "tokens before": (
        lambda g: g.ops("short_convolution", g.array(1, 4, 3), g.array(3, 2), g.array(1, dtype="int32")),
        "before: expected shape (4,) or (1, 4), got (1,)",
    ),
    "groups of heads": (
        lambda g: g.ops("causal_attention", g.array(1, 2, 3, 4), g.array(1, 2, 2, 4), g.array(1, 2, 2, 4)),
        "k: expected a divisor of q's 3 heads as number of groups, got 2",
    ),
    "heads without channels": (
        lambda g: g.ops("fused_attention", *[g.array(1, 2, 1, 0)] * 2, g.array(1, 2, 1, 4)),
        "q: expected heads of at least one channel, got 0",
    ),
    "keys of another type": (
        lambda g: g.ops("fused_attention", g.array(1, 2, 3, 4), g.array(1, 2, 3, 4, dtype="float16"), g.array(1)),
        "k: expected float32, the type of q, got float16",
    ),
    "mask of numbers": (
        lambda g: g.ops("causal_attention", *[g.array(1, 2, 1, 4)] * 3, g.array(1, 2, 2)),
        "attention_mask: expected bool, got float32",
    ),
    "allowed": (
        lambda g: g.ops("masked_attention", *[g.array(1, 2, 1, 4)] * 3, g.array(2, 3, dtype="bool")),
        "allowed: expected shape (2, 2), got (2, 3)",
    ),
}
OF_BOTH = {  # of the reference and of the kernels
    "odd width": (
        lambda g: g.ops("swiglu", g.array(3, 5), impl=g.impl),
        "x: expected gate and value side by side, an even width, got 5",
    ),
    "integers": (lambda g: g.ops("gelu", g.array(3, dtype="int32"), impl=g.impl), "x: expected a type among float16"),
    "no axes": (lambda g: g.ops("gelu", g.array(), impl=g.impl), "x: expected at least 1 axes, got shape ()"),
    "gelu of a list": (lambda g: g.ops("gelu", [1.0], impl=g.impl), "x: " + DENSE + "list"),
    "not square": (lambda g: g.mhc("sinkhorn", g.array(2, 3, 4)), "logits: expected shape (2, 3, 3), got (2, 3, 4)"),
    "one axis": (lambda g: g.mhc("sinkhorn", g.array(3)), "logits: expected at least 2 axes, got shape (3,)"),
    "no rows": (lambda g: g.mhc("sinkhorn", g.array(2, 0, 0)), "logits: expected matrices of at least one row, got"),
    "fractional iterations": (
        lambda g: g.mhc("sinkhorn", g.array(3, 3), 2.5),
        "iterations: expected an integer, got 2.5",
    ),
    "iterations as a truth": (lambda g: g.mhc("sinkhorn", g.array(3, 3), True), "iterations: expected an integer, got"),
    "last": (lambda g: g.mhc("sinkhorn", g.array(3, 3), 2, "both"), "last: expected 'row' or 'column', got 'both'"),
    "integer logits": (
        lambda g: g.mhc("sinkhorn", g.array(3, 3, dtype="int64")),
        "logits: expected a type among float16, bfloat16, float32, float64, got int64",
    ),
    "streams without a batch": (
        lambda g: g.mhc("aggregate", g.array(3, 4, 8), g.array(3, 4)),
        "x: expected shape [B, T, S, D], got (3, 4, 8)",
    ),
    "h_pre": (
        lambda g: g.mhc("aggregate", g.array(2, 3, 4, 8), g.array(2, 3, 5)),
        "h_pre: expected shape (2, 3, 4), got (2, 3, 5)",
    ),
    "h_res": (
        lambda g: g.mhc("apply_h_res", g.array(2, 3, 4, 3), g.array(2, 3, 4, 8)),
        "h_res: expected shape (2, 3, 4, 4), got (2, 3, 4, 3)",
    ),
    "h_post": (
        lambda g: g.mhc("apply_h_post", g.array(2, 3, 8), None, g.array(2, 1, 4)),
        "h_post: expected shape (2, 3, 4), got (2, 1, 4)",
    ),
    "phi": (
        lambda g: g.mhc("compute_mappings", g.array(2, 3, 4, 8), g.array(32, 23), g.array(3), g.array(24)),
        "phi: expected shape (32, 24), got (32, 23)",
    ),
    "written rows": (lambda g: g.written(rows=(3, 2)), "state.row_low: expected shape (2, 3), got (3, 2)"),
    "written rate": (lambda g: g.written(1.0), RATE + "1.0"),
    "written site": (lambda g: g.written(site=-1), "site: " + WORD + "-1"),
    "written seed": (lambda g: g.written(seed=0.5), "state.seed: " + WORD + "0.5"),
}
DIRECT = {  # of the kernels without the reference in front
    "site": (
        lambda d, g: d.write_streams(
            g.array(2, 3, 4, 8), None, g.array(2, 3, 8), None, g.array(2, 3, 4), 0.1, g.state(2, 3), 2**32
        ),
        "site: " + WORD + "4294967296",
    ),
    "a list": (lambda d, g: d.gelu([1.0]), "x: " + DENSE + "list"),
    "numpy": (lambda d, g: d.swiglu(np.ones((2, 4), np.float32)), "x: " + DENSE + "ndarray"),
    "fractional iterations": (lambda d, g: d.sinkhorn(g.array(3, 3), 1.5), "iterations: expected an integer, got 1.5"),
    "rms_epsilon": (
        lambda d, g: d.compute_mappings(
            g.array(1, 1, 2, 2), g.array(4, 8), g.array(3), g.array(8), rms_epsilon=float("inf")
        ),
        "rms_epsilon: expected a finite number of at least 0, got inf",
    ),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", OPERATIONS)
def test_operations_refuse_bad_operands(backend, what):
    call, message = OPERATIONS[what]
    with pytest.raises(ValueError, match=re.escape(message)):
        call(Given(backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("what", OF_BOTH)
def test_reference_and_kernels_refuse_the_same(backend, impl, what):
    call, message = OF_BOTH[what]
    with pytest.raises(ValueError, match=re.escape(message)):
        call(Given(backend, impl))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("what", DIRECT)
def test_kernels_refuse_bad_operands(backend, what):
    call, message = DIRECT[what]
    with pytest.raises(ValueError, match=re.escape(message)):
        call(LIBRARIES[backend], Given(backend))


def test_sparse_tensors_are_refused():
    sparse = torch.eye(4).to_sparse()
    for call in (torch_ops.gelu, inspect.unwrap(backend_module("torch", "ops").gelu)):
        with pytest.raises(ValueError, match="x: expected a dense array of the backend's framework, got sparse_coo"):
            call(sparse)


@pytest.mark.parametrize("wrong", [-1, 5, torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max])
def test_targets_that_are_no_token_ids(wrong):
    """int64's least number is what PyTorch's own loss was told to leave out."""
    targets = torch.tensor([[0, wrong]])
    with pytest.raises(IndexError, match=rf"targets: expected token ids in \[0, 5\), got {wrong}"):
        backend_module("torch", "ops").cross_entropy(torch.zeros(1, 2, 5), targets)
    assert np.isnan(backend_module("jax", "ops").cross_entropy(jnp.zeros((1, 2, 5)), jnp.asarray([[0, wrong]])))
