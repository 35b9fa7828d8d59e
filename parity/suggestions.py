"""Proposal of a mapping of parameter names, from shapes, order and similarity of names."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table
from scipy.optimize import linear_sum_assignment

from parity.names import Shapes, star_pattern
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
    ("q", "query"),
    ("k", "key"),
    ("v",),
)
"""Words that frameworks and papers use for one thing."""
_FUSED = (("q", "k", "v"), ("query", "key", "value"), ("i", "f", "g", "o"), ("r", "z", "n"))
"""Orders in which PyTorch concatenates the parameters of attention, LSTM and GRU, in the words of flax."""
_ROLE = re.compile("([wb])([qkvo])")
"""Names such as wq and bo: a weight or a bias, and its role in attention."""
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
    unlikely: dict[str, list[Any]] = field(default_factory=dict)
    """Rules that fit the shapes, but not the usual layouts of layers; only agreement of the outputs chooses them."""

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
    names = _fused(ours, theirs)
    single, free = _unmatched(names, ours, theirs)
    entries = {**single, **_stacks(single, free)}
    sources = list(entries)
    targets = list(free)
    scores = np.full((len(sources), len(targets)), -1.0)
    rules: dict[tuple[int, int], _Rules] = {}
    for i, source in enumerate(sources):
        for j, target in enumerate(targets):
            fitting = _rules(source, entries[source], target, theirs[target])
            if fitting.likely:
                rules[i, j] = fitting
                place = abs(i / max(1, len(sources)) - j / max(1, len(targets)))
                scores[i, j] = _similarity(source, target) + 0.2 * (1.0 - place)
    ambiguous: dict[str, list[Any]] = {}
    unlikely: dict[str, list[Any]] = {}
    names_of = sources, targets
    for i, j in zip(*linear_sum_assignment(-scores), strict=True):
        if (i, j) not in rules:
            continue
        chosen, *others = rules[i, j].likely
        names[sources[i]] = chosen
        near = [k for k in range(len(targets)) if k != j and (i, k) in rules and _is_near(i, k, j, scores, names_of)]
        others += [rule for k in near for rule in rules[i, k].likely]
        if others:
            ambiguous[sources[i]] = others
        if rules[i, j].unlikely:
            unlikely[sources[i]] = list(rules[i, j].unlikely)
    left, missing = _unmatched(names, ours, theirs)
    return SuggestedNames(names, ambiguous, tuple(left), tuple(missing), unlikely)


def _is_near(i: int, k: int, j: int, scores: np.ndarray, names: tuple[list[str], list[str]]) -> bool:
    """Return True if another candidate of a parameter fits nearly as well as the chosen one, or only its place tells.

    The places of names that differ in their numbers tell: layers are numbered in their order.

    Args:
        i: number of the parameter.
        k: number of the other candidate.
        j: number of the chosen one.
        scores: similarities of names and places.
        names: all parameters, and all candidates.
    """
    if scores[i, k] > scores[i, j] - 0.05:
        return True
    source = names[0][i]
    other, chosen = (names[1][n] for n in (k, j))
    is_numbered = re.sub(r"\d+", "", other) == re.sub(r"\d+", "", chosen)
    return not is_numbered and _similarity(source, other) >= _similarity(source, chosen) - 1e-9


def settle_square(found: SuggestedNames, ours: Shapes) -> SuggestedNames:
    """Give square matrices the orientation of all other matrices whose names end alike, and end their ambiguity.

    Args:
        found: a proposal whose ambiguous entries the outputs cannot decide, for example because there is a bug.
        ours: shapes of PyTorch's parameters.
    """

    def ends(source: str, rule: Any) -> tuple[str, str]:
        return source.rpartition(".")[2], str(target_of(rule)).rpartition(".")[2]

    def is_transposed(rule: Any) -> bool:
        return not isinstance(rule, str) and rule.get("transpose") is True

    seen: dict[tuple[str, str], set[bool]] = {}
    for source, rule in found.names.items():
        shape = ours.get(source, ())
        if len(shape) == 2 and shape[0] != shape[1]:
            seen.setdefault(ends(source, rule), set()).add(is_transposed(rule))
    names = dict(found.names)
    ambiguous = dict(found.ambiguous)
    for source, others in found.ambiguous.items():
        rules = [names[source], *others]
        orientations = seen.get(ends(source, rules[0]), set())
        fitting = [rule for rule in rules if {is_transposed(rule)} == orientations]
        if len(rules) == 2 and target_of(rules[0]) == target_of(rules[1]) and len(fitting) == 1:
            names[source] = fitting[0]
            del ambiguous[source]
    return replace(found, names=names, ambiguous=ambiguous)


def _unmatched(names: Mapping[str, Any], ours: Shapes, theirs: Shapes) -> tuple[Shapes, Shapes]:
    """Return the parameters of both sides that a mapping does not mention."""
    used = {name for entry in names for name in ours if _matches(entry, name)}
    reached = {name for value in names.values() for name in np.atleast_1d(target_of(value)).tolist()}
    return (
        {name: shape for name, shape in ours.items() if name not in used},
        {name: shape for name, shape in theirs.items() if name not in reached},
    )


def _fused(ours: Shapes, theirs: Shapes) -> dict[str, Any]:
    """Return rules for parameters that are one in PyTorch and several in JAX: q, k and v, or the gates of a cell.

    Args:
        ours: shapes of PyTorch's parameters.
        theirs: shapes of JAX's parameters.
    """
    groups = _groups(theirs)
    found: dict[str, Any] = {}
    for source, shape in ours.items():
        fitting = []
        for lead, members in groups:
            rule = _splitting(shape, theirs[members[0]], len(members))
            # Kernels of inputs have "ih" in PyTorch and "i" before the gate in flax, recurrent ones "hh" and "h".
            if rule is not None and (f"{lead}h_l" in source if lead else True):
                fitting.append((_similarity(source, members[0]), members, rule, lead))
        if fitting:
            _, members, rule, lead = max(fitting, key=lambda entry: entry[0])
            found[source] = {"to": members, **rule}
            groups.remove((lead, members))
    return found


def _groups(theirs: Shapes) -> list[tuple[str, list[str]]]:
    """Return names that differ in one word of _FUSED, in its order, with the letter before that word."""
    found = []
    for name in theirs:
        parts = name.split(".")
        for place, (words, lead) in itertools.product(range(len(parts)), itertools.product(_FUSED, ("", "i", "h"))):
            if parts[place].rstrip("_") != lead + words[0]:
                continue
            forms = [
                [".".join([*parts[:place], lead + w + end, *parts[place + 1 :]]) for end in ("", "_")] for w in words
            ]
            members = [form for alternatives in forms for form in alternatives if form in theirs]
            if len(members) == len(words) and all(theirs[member] == theirs[name] for member in members):
                found.append((lead, members))
    return found


def _splitting(shape: tuple[int, ...], part: tuple[int, ...], count: int) -> dict[str, Any] | None:
    """Return the transforms that split a vector or matrix into parts of a shape, or None."""
    rows, rest = divmod(shape[0], count) if shape else (0, 1)
    if rest or len(shape) > 2 or np.prod(part) * count != np.prod(shape):
        return None
    if len(shape) == 2 and part[:1] != shape[1:]:
        return None
    plain = (*shape[1:], rows)
    rule: dict[str, Any] = {} if len(shape) == 1 else {"transpose": True, "split": 1}
    return rule if part == plain else {**rule, "reshape": list(part)}


class _Rules(NamedTuple):
    """The ways in which a parameter fits another."""

    likely: list[Any]
    """The first is chosen; if there are others, the entry is ambiguous."""
    unlikely: Sequence[Any] = ()
    """See SuggestedNames.unlikely."""


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


def _rules(source: str, shape: tuple[int, ...], target: str, wanted: tuple[int, ...]) -> _Rules:
    """Return the ways in which a parameter fits, the most likely first."""
    stacked = {"stack": 0} if "*" in source else {}
    own, other = (shape[1:], wanted[1:]) if stacked else (shape, wanted)
    if stacked and shape[0] != wanted[0]:
        return _Rules([])
    plain = target if not stacked else {"to": target, **stacked}
    is_layer = source.rpartition(".")[2] == "weight" and target.rpartition(".")[2] == "kernel"
    if len(own) == len(other) == 2 and own == other[::-1]:
        turned = {"to": target, "transpose": True, **stacked}
        if own != other or is_layer:  # linear layers: (out, in) in PyTorch, (in, out) in Flax
            return _Rules([turned])
        return _Rules([plain, turned])
    if own == other and not (is_layer and len(own) > 2):
        return _Rules([plain])
    if len(own) == len(other) and len(own) > 2 and sorted(own) == sorted(other):
        orders = [p for p in itertools.permutations(range(len(own))) if tuple(own[axis] for axis in p) == other]
        return _convolutions(target, orders, is_layer, stacked)
    if np.prod(own) == np.prod(other) and len(own) != len(other):
        turned = {"transpose": True} if is_layer and len(own) == 2 else {}  # a linear layer with several dimensions
        return _Rules([{"to": target, **turned, "reshape": list(other), **stacked}])
    return _Rules([])


def _convolutions(target: str, orders: list[tuple[int, ...]], is_layer: bool, stacked: dict[str, int]) -> _Rules:
    """Return the rules of parameters with more than two dimensions.

    Args:
        target: JAX's name.
        orders: the orders of axes that fit the shapes.
        is_layer: True for the weight of a layer of PyTorch and the kernel of one of flax.
        stacked: transform of stacked layers.
    """
    rank = len(orders[0])
    spatial = tuple(range(2, rank))
    usual = (*spatial, 1, 0)  # a convolution: (out, in, *kernel) becomes (*kernel, in, out)
    straight = (*spatial, 0, 1)  # a transposed one: (in, out, *kernel); flax does not flip the kernel, PyTorch does
    rules = {
        order: {"to": target, "transpose": list(order)} | ({"flip": list(range(rank - 2))} if order == straight else {})
        for order in orders
    }
    if is_layer and not stacked and not {usual, straight}.isdisjoint(orders):
        known = [rules[order] for order in (usual, straight) if order in rules]
        return _Rules(known[:1], known[1:])
    orders.sort(key=lambda order: order != usual)
    return _Rules([{"to": target, "transpose": list(order), **stacked} for order in orders])


def _similarity(one: str, other: str) -> float:
    """Return the similarity of two names, 0 to 1: shared words, where synonyms are equal and numbers count double.

    Equal numbers in another order, as in blocks.1.norm2 and blocks.2.norm1, make names less similar.
    """
    first = _tokens(one)
    second = _tokens(other)
    shared = sum((2 if token.isdigit() else 1) for token in first & second)
    every = sum((2 if token.isdigit() else 1) for token in first | second)
    orders = [re.findall(r"\d+", name) for name in (one, other)]
    is_turned = orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    return shared / every * (0.5 if is_turned else 1.0) if every else 0.0


def _tokens(name: str) -> set[str]:
    found = set()
    for place, part in enumerate(name.split(".")):
        words: list[str] = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", part)
        for word in map(str.lower, words):
            role = _ROLE.fullmatch(word)
            if role is not None:
                found |= {_CANONICAL[letter] for letter in role.groups() if letter in _CANONICAL}
            elif word == "value" and (place == 0 or place < name.count(".")):
                found.add("v")  # of attention; after the name of a parameter it is the array that a variable holds
            else:
                found.add(_CANONICAL.get(word) or word)
    return found


def _matches(entry: str, name: str) -> bool:
    return bool(star_pattern(entry).fullmatch(name))


def target_of(value: Any) -> Any:
    """Return JAX's name in an entry of a mapping, or the list of names."""
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
