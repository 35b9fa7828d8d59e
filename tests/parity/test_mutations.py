"""The mutation benchmark: a few bugs and seeds, and all of them where make test-all runs them."""

import inspect

import numpy as np
import pytest

from benchmarks.locate import TOLERANCES, compare_with_seeds, is_right, outputs_in_float32, search, summary
from benchmarks.mutations import project
from benchmarks.mutations.cases import put_in
from benchmarks.mutations.registry import CASES

FEW = {("normalisation layers", "unbiased variance"), ("rotary attention", "gradient through the root stopped")}
ALL = [
    pytest.param(name, bug, id=f"{name}: {bug.name}", marks=[] if (name, bug.name) in FEW else pytest.mark.slow)
    for name, (_, bugs) in CASES.items()
    for bug in bugs
]


def test_there_are_enough_bugs():
    assert len(ALL) >= 36
    assert len(CASES) >= 7
    names = [(name, bug.name) for name, (_, bugs) in CASES.items() for bug in bugs]
    assert len(set(names)) == len(names)
    assert set(names) >= FEW
    assert {bug.side for _, bugs in CASES.values() for bug in bugs} == {"torch", "jax"}
    assert sum(bug.gradients_only for _, bugs in CASES.values() for bug in bugs) >= 8


def test_bugs_override_methods_that_exist():
    """With their required parameters: a bug that raises is none, and most are searched for by make test-all alone."""
    seen = 0
    for bug in (cls for cls in vars(project).values() if inspect.isclass(cls) and cls.__module__ == project.__name__):
        for name, method in vars(bug).items():
            of_project = (
                base for base in bug.__mro__[1:] if base.__module__.startswith(("jax_impl", "reference_torch"))
            )
            overridden = next((vars(base)[name] for base in of_project if name in vars(base)), None)
            if inspect.isfunction(method) and overridden is not None and not name.startswith("__init"):
                own, theirs = (inspect.signature(f).parameters.values() for f in (method, overridden))
                taken = {parameter.name for parameter in own}
                takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in own)
                left = [p.name for p in theirs if p.default is p.empty and p.name not in taken]
                assert takes_all or not left, (bug, name, left)
                seen += 1
    assert seen >= 10


@pytest.mark.parametrize(("name", "bug"), ALL)
def test_a_bug_is_located(name, bug):
    location = search(CASES[name][0], bug, 1)
    assert is_right(bug, location), location


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n == "LSTM" else pytest.mark.slow) for n in CASES])
def test_no_false_alarm(name):
    count, alarms = compare_with_seeds(CASES[name][0], 2 if name == "LSTM" else 6)
    assert count > 50
    assert not alarms


def test_a_comparison_over_seeds_sees_bugs(monkeypatch):
    case, bugs = CASES["normalisation layers"]
    build = type(case).build

    def with_bug(self, seed):
        torch_model, jax_model, inputs = build(self, seed)
        put_in(bugs[0], case, torch_model, jax_model)
        return torch_model, jax_model, inputs

    monkeypatch.setattr(type(case), "build", with_bug)
    _, alarms = compare_with_seeds(case, 1)
    assert {"float64", "float32"} <= {alarm["row"].split(" in ")[1].split(":")[0] for alarm in alarms}


def test_usual_tolerances_accept_what_they_say():
    one = np.array([[0.0, 1.0]], np.float32)
    accepted = {shift: [n for n, f in TOLERANCES.items() if f(one, one + shift)] for shift in (0.0, 1e-6, 4e-2, 0.1)}
    every = list(TOLERANCES)
    assert accepted == {0.0: every, 1e-6: [*every[:3], "torch"], 4e-2: every[:3], 0.1: every[1:3]}
    assert not TOLERANCES["KL 0.1"](one, one * np.array([[1.0, 3.0]], np.float32))
    case, bugs = CASES["normalisation layers"]
    first, second = outputs_in_float32(case, None, 0)
    assert np.abs(first - second).max() < 1e-5
    first, second = outputs_in_float32(case, bugs[0], 0)
    assert np.abs(first - second).max() > 1e-4


def test_a_summary_counts_what_is_located():
    row = {"pair": "a", "is_right": True, "seconds": 2.0, "accepted": dict.fromkeys(TOLERANCES, True)}
    text = summary([row, row | {"is_right": False, "pair": "b", "accepted": dict.fromkeys(TOLERANCES, False)}])
    assert text.startswith("1 of 2 bugs in 2 pairs are located (50%), in 2 s (median). Bugs that a tolerance accepts: ")
    assert "0.05 1" in text
