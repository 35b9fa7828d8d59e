"""Proposal of a mapping of parameter names, from shapes, order and similarity of names."""

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from rich.table import Table
from scipy.optimize import linear_sum_assignment

from parity.names import Shapes
from parity.tables import table_text

_SYNONYMS = (
    ("weight", "kernel", "scale", "embedding", "w", "gamma", "value"),
    ("bias", "b", "beta"),
    ("block", "blocks", "layer", "layers", "h"),
    ("norm", "ln", "layernorm", "rmsnorm", "bn"),
    ("attn", "attention", "att", "mha"),
    ("mlp", "ffn", "ff", "feedforward"),
    ("emb", "embed", "embedding", "embeddings", "wte", "tok"),
    ("dense", "linear", "fc", "proj", "projection"),
    ("out", "output", "head", "o"),
    ("mean", "running_mean"),
    ("var", "running_var"),
)
"""Words that frameworks and papers use for one thing."""
_CANONICAL: dict[str, str] = {word: words[0] for words in reversed(_SYNONYMS) for word in words}


@dataclass(frozen=True)
class SuggestedNames(Mapping):
    """A proposed mapping, which compare_modules accepts as ``names``."""

    names: dict[str, Any]
    """PyTorch's name: JAX's name, or a table with transforms."""
    ambiguous: dict[str, list[Any]] = field(default_factory=dict)
    """Entries for which others fit nearly as well, the alternatives after the chosen one."""
    unmatched_torch: tuple[str, ...] = ()
    unmatched_jax: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Any:
        return self.names[name]

    def __iter__(self):
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def __str__(self) -> str:
        table = Table(box=None, pad_edge=False)
        for column in ("PyTorch", "JAX", "transform", "alternatives"):
            table.add_column(column, no_wrap=True)
        for name, value in self.names.items():
            others = ", ".join(_words(other) for other in self.ambiguous.get(name, []))
            transforms = {} if isinstance(value, str) else {key: x for key, x in value.items() if key != "to"}
            target = value if isinstance(value, str) else value["to"]
            table.add_row(name, str(target), ", ".join(f"{k} {v}" for k, v in transforms.items()), others)
        for name in self.unmatched_torch:
            table.add_row(name, "no counterpart", "", "")
        for name in self.unmatched_jax:
            table.add_row("no counterpart", name, "", "")
        return table_text(table)

    def to_toml(self) -> str:
        """Return the mapping as TOML, for ``diptych locate --names``."""
        lines = []
        for name, value in self.names.items():
            words = f'"{value}"' if isinstance(value, str) else "{ " + ", ".join(_toml(value)) + " }"
            lines.append(f'"{name}" = {words}')
        return "\n".join(lines) + "\n"


def propose_names(ours: Shapes, theirs: Shapes) -> SuggestedNames:
    """Propose which parameters belong together.

    Parameters of equal, transposed or stacked shape are candidates. Among those, the pairs with the most similar names
    and positions are chosen together, so that each parameter is used once.

    Args:
        ours: shapes of PyTorch's parameters, in their order.
        theirs: shapes of JAX's parameters.
    """
    entries = {**ours, **_stacks(ours, theirs)}
    sources, targets = list(entries), list(theirs)
    scores = np.full((len(sources), len(targets)), -1.0)
    rules: dict[tuple[int, int], list[Any]] = {}
    for i, source in enumerate(sources):
        for j, target in enumerate(targets):
            fitting = _rules(source, entries[source], target, theirs[target])
            if fitting:
                rules[i, j] = fitting
                place = abs(i / max(1, len(sources)) - j / max(1, len(targets)))
                scores[i, j] = _similarity(source, target) + 0.2 * (1.0 - place)
    names: dict[str, Any] = {}
    ambiguous: dict[str, list[Any]] = {}
    for i, j in zip(*linear_sum_assignment(-scores), strict=True):
        if (i, j) not in rules:
            continue
        chosen, *others = rules[i, j]
        names[sources[i]] = chosen
        near = [k for k in range(len(targets)) if k != j and scores[i, k] > scores[i, j] - 0.05 and (i, k) in rules]
        others += [rule for k in near for rule in rules[i, k]]
        if others:
            ambiguous[sources[i]] = others
    used = {name for entry in names for name in ours if _matches(entry, name)}
    reached = {target_of(value) for value in names.values()}
    return SuggestedNames(
        names,
        ambiguous,
        tuple(name for name in ours if name not in used),
        tuple(name for name in theirs if name not in reached),
    )


def _stacks(ours: Shapes, theirs: Shapes) -> dict[str, tuple[int, ...]]:
    """Return patterns of PyTorch's layers, with their number as first dimension, where JAX has no such layers."""
    groups: dict[str, list[tuple[int, ...]]] = {}
    for name, shape in ours.items():
        for match in re.finditer(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", name):
            groups.setdefault(f"{name[: match.start()]}*{name[match.end() :]}", []).append(shape)
    found = {name: (len(shapes), *shapes[0]) for name, shapes in groups.items() if len(set(shapes)) == 1}
    wanted = {tuple(sorted(shape)) for shape in theirs.values()}
    plain = {tuple(sorted(shape)) for shape in ours.values()}
    return {n: s for n, s in found.items() if tuple(sorted(s)) in wanted - plain}


def _rules(source: str, shape: tuple[int, ...], target: str, wanted: tuple[int, ...]) -> list[Any]:
    """Return the ways in which a parameter fits, the most likely first."""
    stacked = {"stack": 0} if "*" in source else {}
    own, other = (shape[1:], wanted[1:]) if stacked else (shape, wanted)
    if stacked and shape[0] != wanted[0]:
        return []
    plain = target if not stacked else {"to": target, **stacked}
    if len(own) == len(other) == 2 and own == other[::-1]:
        turned = {"to": target, "transpose": True, **stacked}
        is_layer = source.rpartition(".")[2] == "weight" and target.rpartition(".")[2] == "kernel"
        if own != other or is_layer:  # linear layers: (out, in) in PyTorch, (in, out) in Flax
            return [turned]
        return [plain, turned]
    if own == other:
        return [plain]
    if len(own) == len(other) and len(own) > 2 and sorted(own) == sorted(other):
        orders = [p for p in itertools.permutations(range(len(own))) if tuple(own[axis] for axis in p) == other]
        usual = (*range(2, len(own)), 1, 0)  # a convolution: (out, in, *kernel) becomes (*kernel, in, out)
        orders.sort(key=lambda order: order != usual)
        return [{"to": target, "transpose": list(order), **stacked} for order in orders]
    if np.prod(own) == np.prod(other) and len(own) != len(other):
        return [{"to": target, "reshape": list(other), **stacked}]
    return []


def _similarity(one: str, other: str) -> float:
    """Return the similarity of two names, 0 to 1: shared words, where synonyms are equal and numbers count double.

    Equal numbers in another order, as in blocks.1.norm2 and blocks.2.norm1, make names less similar.
    """
    first, second = _tokens(one), _tokens(other)
    shared = sum((2 if token.isdigit() else 1) for token in first & second)
    every = sum((2 if token.isdigit() else 1) for token in first | second)
    orders = [re.findall(r"\d+", name) for name in (one, other)]
    is_turned = orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    return shared / every * (0.5 if is_turned else 1.0) if every else 0.0


def _tokens(name: str) -> set[str]:
    words: list[str] = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)
    return {_CANONICAL.get(word.lower()) or word.lower() for word in words}


def _matches(entry: str, name: str) -> bool:
    return bool(re.fullmatch(re.escape(entry).replace(r"\*", r"[^.]*"), name))


def target_of(value: Any) -> str:
    """Return JAX's name in an entry of a mapping."""
    return value if isinstance(value, str) else value["to"]


def retargeted(value: Any, target: str) -> Any:
    """Return an entry of a mapping with another name of JAX."""
    return target if isinstance(value, str) else {**value, "to": target}


def _words(value: Any) -> str:
    return value if isinstance(value, str) else " ".join(f"{key} {x}" if key != "to" else x for key, x in value.items())


def _toml(value: Mapping[str, Any]) -> Iterable[str]:
    for key, x in value.items():
        word = str(x).lower() if isinstance(x, bool) else f'"{x}"' if isinstance(x, str) else str(x)
        yield f"{key} = {word}"
