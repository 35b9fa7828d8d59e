"""Random graphs of checkpoints, blocks and readers have the gradients of the plain graph."""

import contextlib
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from reference_torch.recompute import CheckpointWithoutOutput, MHCBlockRecomputeManager, internals
from tests.backends import draws_are_fixed
from tests.recompute.support import (
    gradients,
    is_empty,
    listed,
    normal,
    reader,
    reference_counting_only,
    traced,
    without_exchange,
)

SIZE = 3
OPERATIONS: dict[str, Callable] = {
    "tanh": lambda a, b, w: a.tanh(),
    "gelu": lambda a, b, w: F.gelu(a),
    "sigmoid": lambda a, b, w: a.t().sigmoid(),
    "softmax": lambda a, b, w: a.softmax(-1),
    "multiply": lambda a, b, w: a * b,
    "matmul": lambda a, b, w: a @ b,
    "linear": lambda a, b, w: F.gelu(F.linear(a, w)),
    "dropout": lambda a, b, w: F.dropout(a, 0.5) + b.sin(),
    "view": lambda a, b, w: a.reshape(-1).flip(0).view(SIZE, SIZE),
    "transpose": lambda a, b, w: a.t(),
    "transposed result": lambda a, b, w: (a @ w).tanh().t(),
    "two": lambda a, b, w: (a.tanh(), (a * b).t()),
    "aliases": lambda a, b, w: (lambda y: (y, y.t()))((a * w).tanh()),
    "input and result": lambda a, b, w: (a, a.exp().clamp(max=3.0) * b),
    "chunks": lambda a, b, w: tuple(torch.cat([a.tanh(), b * a]).chunk(2)),
}
MODES = ("plain", "checkpoint", "managed")
step = st.tuples(
    st.sampled_from(sorted(OPERATIONS)),
    st.integers(0, 40),
    st.integers(0, 40),
    st.sampled_from(MODES),
    st.booleans(),
    st.booleans(),
)
"""Operation; which earlier values it reads; how; whether a loss reads its result; whether consumed values go now."""


def run_program(steps, order, scoped: bool, recompute: bool, seed: int, drawn: Counter | None = None):
    """Gradients of every loss of a random graph, one backward each, in the order given."""
    drawn = Counter() if drawn is None else drawn
    torch.manual_seed(seed)
    x, w = normal(seed, SIZE, SIZE), normal(seed + 1, SIZE, SIZE)
    values, losses, checkpoints = [x * 1], [], []
    reads = [[values_read % (i + 1) for values_read in (s[1], s[2])] for i, s in enumerate(steps)]
    manager = MHCBlockRecomputeManager()
    with manager if recompute and scoped else contextlib.nullcontext():
        results: list[list[Tensor]] = [values]
        for i, (name, _, _, mode, has_loss, discard_now) in enumerate(steps):
            a, b = (results[j][-1] for j in reads[i])
            if not recompute or mode == "plain":
                result = OPERATIONS[name](a, b, w)
            elif mode == "managed" and scoped:
                result = manager.checkpoint(OPERATIONS[name], a, b, w)
            else:
                checkpoints.append(CheckpointWithoutOutput(name))
                result = checkpoints[-1].checkpoint(OPERATIONS[name], a, b, w)
            results.append(listed(result))
            if has_loss or i == len(steps) - 1:
                losses.append(sum(reader(y) for y in results[-1]))
            if recompute and scoped and discard_now:
                needed = {j for later in reads[i + 1 :] for j in later if j <= i + 1}
                manager.discard_consumed(*(results[j][-1] for j in needed))
                for checkpoint in checkpoints:
                    addresses = {results[j][-1].untyped_storage()._cdata for j in needed}
                    if not any(o.untyped_storage()._cdata in addresses for o in checkpoint.outputs):
                        checkpoint.discard_output()
                drawn["emptied before the end"] += any(is_empty(y) for group in results for y in group)
        total = torch.stack(losses).sin()
        if recompute and scoped:
            manager.discard_all_outputs_and_register_unified_recompute(total)
        for checkpoint in checkpoints:
            checkpoint.discard_output_and_register_recompute(total)
            drawn["kept"] += bool(checkpoint.retained)
    if recompute:
        empty = [{y.untyped_storage()._cdata for y in group if is_empty(y)} for group in results]
        drawn["read by a later one"] += any(empty[j] and empty[i + 1] for i, js in enumerate(reads) for j in js)
        drawn["several empty"] += sum(map(bool, empty)) >= 3
        drawn["dropout replayed"] += any(s[0] == "dropout" and s[3] != "plain" for s in steps)
        drawn["empty views"] += any(is_empty(y) and not y.is_contiguous() for group in results for y in group)
    del values, results, manager, checkpoints
    targets = [losses[i % len(losses)] for i in order] + [total]
    drawn["losses of their own"] += recompute and len({id(t) for t in targets}) > 2
    drawn["one loss twice"] += recompute and len({id(t) for t in targets}) < len(targets)
    return [
        gradients(target, [x, w], seed=i, retain_graph=i < len(targets) - 1, allow_unused=True, materialize_grads=True)
        for i, target in enumerate(targets)
    ]


@pytest.mark.thorough
@pytest.mark.parametrize("exchange", [True, False])
def test_any_graph_has_the_gradients_of_the_plain_graph(exchange, monkeypatch):
    drawn: Counter = Counter()
    if not exchange:
        without_exchange(monkeypatch)
    elif not internals.HAS_SWAP:
        pytest.skip("this PyTorch cannot exchange the memory of storages")

    @given(
        st.lists(step, min_size=1, max_size=9),
        st.lists(st.integers(0, 8), max_size=4),
        st.booleans(),
        st.integers(0, 2**16),
    )
    @settings(max_examples=5 * settings.default.max_examples)
    def check(steps, order, scoped, seed):
        with traced() as trace, reference_counting_only():
            actual = run_program(steps, order, scoped, True, seed, drawn)
            expected = run_program(steps, order, scoped, False, seed)
            for ours, plain in zip(actual, expected, strict=True):
                for a, b in zip(ours, plain, strict=True):
                    assert b.isfinite().all()
                    assert torch.equal(a, b)
            drawn["replayed twice"] += len(trace.replayed) > len(set(trace.replayed))
            drawn["scoped" if scoped else "hooked"] += bool(trace.replayed)
            drawn["checked"] += bool(expected[-1][0].any())
            assert trace.alive == []

    check()
    if draws_are_fixed():
        hard = ("emptied before the end", "kept", "read by a later one", "several empty", "dropout replayed")
        hard += (
            "empty views",
            "losses of their own",
            "one loss twice",
            "replayed twice",
            "scoped",
            "hooked",
            "checked",
        )
        assert all(drawn[case] >= 5 for case in hard), drawn


def test_a_result_that_no_loss_reads_is_released():
    def step():
        x = normal(0, SIZE, SIZE)
        checkpoint = CheckpointWithoutOutput()
        unread = checkpoint.checkpoint(lambda a: (lambda y: (y, y.t()))((a * a).tanh()), x)
        loss = x.sin().sum()
        checkpoint.discard_output_and_register_recompute(loss)
        loss.backward()
        assert torch.equal(unread[0], (x * x).tanh())

    step()  # the first call imports modules, in reference cycles
    with traced() as trace, reference_counting_only():
        step()
        assert trace.replayed
        assert trace.alive == []
