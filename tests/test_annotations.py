"""The import hook of tests/annotations.py: what it checks, and what it leaves alone."""

import importlib
import sys

import numpy as np
import pytest

from tests.annotations import enforce_annotations

SOURCE = """
from dataclasses import dataclass
from typing import List

import numpy as np
from jaxtyping import Float


def matmul(x: Float[np.ndarray, "m k"], y: Float[np.ndarray, "k n"]) -> Float[np.ndarray, "m n"]:
    return (x @ y)[: 1 if x[0, 0] < 0 else None]


def repeat(text: str, count: int) -> str:
    return text * count if count else 0


def outer():
    def inner(count: int) -> int:
        return count

    return inner("a text")


class Model:
    def scale(self, factor: float) -> float:
        return factor

    @staticmethod
    def first(x: Float[np.ndarray, "n"]) -> float:
        return float(x[0])

    @property
    def size(self) -> int:
        return "none"


@dataclass
class Settings:
    width: int
    names: "List[str]"
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "annotated_package.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    enforce_annotations("annotated_package")
    yield importlib.import_module("annotated_package")
    del sys.modules["annotated_package"]


WRONG = {
    "sizes": lambda m: m.matmul(np.ones((2, 3)), np.ones((2, 3))),
    "a result's size": lambda m: m.matmul(-np.ones((2, 3)), np.ones((3, 2))),
    "a dtype": lambda m: m.matmul(np.ones((2, 3), int), np.ones((3, 2))),
    "an argument": lambda m: m.repeat("a", "b"),
    "a result": lambda m: m.repeat("a", 0),
    "an argument of a method": lambda m: m.Model().scale("2"),
    "an array of a static method": lambda m: m.Model.first(np.ones((2, 2))),
    "a property": lambda m: m.Model().size,
    "a field": lambda m: m.Settings("8", []),
    "a field whose annotation is text": lambda m: m.Settings(8, 1),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_contradicts_an_annotation_is_an_error(package, case):
    with pytest.raises(TypeError, match=r"annotation|hint|Type-check|violates"):
        WRONG[case](package)


def test_what_agrees_passes(package):
    assert package.matmul(np.ones((2, 3)), np.ones((3, 4))).shape == (2, 4)
    assert package.repeat("a", count=2) == "aa"
    assert package.Model().scale(2.0) == 2.0
    assert package.Settings(8, ["a"]).width == 8


def test_functions_inside_of_functions_are_left_alone(package):
    assert package.outer() == "a text"


def test_nothing_is_checked_where_a_test_switches_it_off(package, unchecked_shapes):
    assert package.repeat("a", 0) == 0
    assert package.Model().scale("2") == "2"
    assert package.matmul(np.ones((2, 3), int), np.ones((3, 4))).shape == (2, 4)
