"""Names of parameters in both frameworks: which belong together, and how their layouts differ.

A mapping has PyTorch's name as key and JAX's name as value. A value may also be a table with transforms, applied in the
order of this list:

    join        axis; the key lists several parameters in braces, "attn.{q,k,v}.weight", which JAX concatenates
    transpose   true for the last two axes, or the order of all axes
    flip        axes whose order of elements is reversed, as in the kernel of a transposed convolution
    split       axis; "to" lists the names of the equal parts
    reshape     shape of each part
    stack       axis; the key contains "*" and "to" does not: JAX stacks the layers, as for a scan over them

``*`` stands for any text without a dot, in the key and at the same place of the value.

    names = {
        "blocks.*.norm.weight": "blocks.*.norm.scale",
        "blocks.*.attn.weight": {"to": "blocks.*.attn.kernel", "transpose": True},
    }
"""

import difflib
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from parity.pytrees import Leaves

KEYS = ("to", "join", "transpose", "flip", "split", "reshape", "stack")
Shapes = Mapping[str, tuple[int, ...]]
"""Shapes by name."""


class Link(NamedTuple):
    """Parameters of PyTorch that hold the same elements as parameters of JAX."""

    torch_names: tuple[str, ...]
    jax_names: tuple[str, ...]
    convert: Callable[[Sequence[np.ndarray]], list[np.ndarray]]
    """Return JAX's arrays for PyTorch's."""


@dataclass(frozen=True)
class Links:
    """All pairs of parameters of two modules."""

    links: tuple[Link, ...]

    def __call__(self, arrays: Leaves) -> Leaves:
        """Return arrays with JAX's names and layouts for those of PyTorch; names without a link are left out."""
        found: Leaves = {}
        for link in self.links:
            if all(name in arrays for name in link.torch_names):
                found.update(zip(link.jax_names, link.convert([arrays[n] for n in link.torch_names]), strict=True))
        return found

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """All pairs of names that share elements, PyTorch's first."""
        return [pair for link in self.links for pair in itertools.product(link.torch_names, link.jax_names)]


def resolve(
    names: Mapping[str, Any], torch: Shapes, jax: Shapes, ignore: Iterable[str] = (), constants: Iterable[str] = ()
) -> Links:
    """Return the pairs of parameters that a mapping describes.

    Args:
        names: the mapping; parameters that it does not mention belong to the one of equal name, if there is one.
        torch: shapes of PyTorch's parameters.
        jax: shapes of JAX's parameters.
        ignore: patterns of names, of either side, that have no counterpart.
        constants: names of JAX that need no counterpart.

    Raises:
        ValueError: a name matches nothing, shapes do not fit, or a parameter has no counterpart or several.
    """
    links: list[Link] = []
    for key, value in names.items():
        links.extend(_links(key, value, torch, jax))
    used = {name for link in links for name in link.torch_names}
    reached = {name for link in links for name in link.jax_names}
    for name, shape in torch.items():
        if name not in used and name not in reached and jax.get(name) == shape:
            links.append(Link((name,), (name,), list))
    _check_complete(links, torch, jax, [star_pattern(pattern) for pattern in [*ignore, *constants]])
    return Links(tuple(links))


def _links(key: str, value: Any, torch: Shapes, jax: Shapes) -> list[Link]:
    """Return the pairs that one entry of a mapping describes."""
    rule = {"to": value} if isinstance(value, (str, list, tuple)) else dict(value)
    unknown = sorted(rule.keys() - set(KEYS))
    if unknown or "to" not in rule:
        raise ValueError(f"names[{key!r}]: expected the keys {', '.join(KEYS)}, with 'to', got {', '.join(rule)}")
    targets = [rule["to"]] if isinstance(rule["to"], str) else list(rule["to"])
    sources = _alternatives(key)
    matches = [_matches(source, torch) for source in sources]
    for source, found in zip(sources, matches, strict=True):
        if not found:
            raise ValueError(_no_match(f"names[{key!r}]", source, torch, "PyTorch"))
    stars = list(matches[0])
    for source, found in zip(sources, matches, strict=True):
        if list(found) != stars:
            raise ValueError(f"names[{key!r}]: expected the same layers for each name in braces, {source!r} has others")
    if stars != [()] and not any("*" in target for target in targets):
        groups = [(tuple(found[star] for found in matches for star in stars), ())]
    else:
        groups = [(tuple(found[star] for found in matches), star) for star in stars]
    made = []
    for torch_names, star in groups:
        jax_names = tuple(_filled(target, star) for target in targets)
        for name in jax_names:
            if name not in jax:
                raise ValueError(_no_match(f"names[{key!r}]", name, jax, "JAX"))
        convert = _converter(rule, len(sources), len(stars) if star == () else 1)
        _check_shapes(key, rule, convert, torch_names, jax_names, torch, jax)
        made.append(Link(torch_names, jax_names, convert))
    return made


def _alternatives(key: str) -> list[str]:
    """Return the names that braces in a key list."""
    found = re.fullmatch(r"(.*)\{(.*)\}(.*)", key)
    return [f"{found[1]}{part.strip()}{found[3]}" for part in found[2].split(",")] if found else [key]


def star_pattern(name: str) -> re.Pattern:
    """Return the regular expression of a name in which ``*`` stands for any text without a dot."""
    return re.compile(re.escape(name).replace(r"\*", r"([^.]*)"))


def _matches(pattern: str, shapes: Shapes) -> dict[tuple[str, ...], str]:
    """Return the names that match, by the texts in place of the stars, numbers in their order."""
    compiled = star_pattern(pattern)
    found = {match.groups(): name for name in shapes if (match := compiled.fullmatch(name))}
    return dict(
        sorted(found.items(), key=lambda item: [(not s.isdigit(), int(s) if s.isdigit() else 0, s) for s in item[0]])
    )


def _filled(pattern: str, star: tuple[str, ...]) -> str:
    texts = iter(star)
    return re.sub(r"\*", lambda _: next(texts, "*"), pattern)


def _converter(rule: Mapping[str, Any], joined: int, layers: int) -> Callable[[Sequence[np.ndarray]], list[np.ndarray]]:
    """Return the function that applies the transforms of a rule.

    Args:
        rule: the transforms.
        joined: number of parameters that are concatenated.
        layers: number of layers that are stacked; the arrays of one parameter stand together.
    """

    def convert(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        columns = [arrays[place * layers : (place + 1) * layers] for place in range(joined)]
        parts = [_one_layer(list(layer), rule) for layer in zip(*columns, strict=True)]
        if layers == 1 and "stack" not in rule:
            return parts[0]
        return [np.stack(layer, rule.get("stack") or 0) for layer in zip(*parts, strict=True)]

    return convert


def _one_layer(arrays: list[np.ndarray], rule: Mapping[str, Any]) -> list[np.ndarray]:
    """Return JAX's arrays of one layer."""
    array = np.concatenate(arrays, rule.get("join", 0)) if len(arrays) > 1 else arrays[0]
    if "transpose" in rule and rule["transpose"] is not False:
        array = np.swapaxes(array, -1, -2) if rule["transpose"] is True else np.transpose(array, rule["transpose"])
    array = np.flip(array, rule["flip"]) if "flip" in rule else array
    targets = 1 if isinstance(rule["to"], str) else len(rule["to"])
    parts = np.split(array, targets, rule.get("split", 0)) if targets > 1 else [array]
    return [part.reshape(rule["reshape"]) for part in parts] if "reshape" in rule else parts


def _check_shapes(
    key: str,
    rule: Mapping[str, Any],
    convert: Callable,
    torch_names: Sequence[str],
    jax_names: Sequence[str],
    torch: Shapes,
    jax: Shapes,
) -> None:
    """Raise a ValueError if the transforms do not give JAX's shapes."""
    given = [torch[name] for name in torch_names]
    wanted = [jax[name] for name in jax_names]
    try:
        made = [array.shape for array in convert([np.broadcast_to(np.float32(0), shape) for shape in given])]
    except (ValueError, IndexError) as error:
        raise ValueError(f"names[{key!r}]: the transforms do not fit the shapes {given}: {error}") from error
    if made != wanted:
        tip = "; add 'transpose': True" if [shape[::-1] for shape in made] == wanted and "transpose" not in rule else ""
        raise ValueError(
            f"names[{key!r}]: expected the shapes {_listed(wanted)} of {', '.join(jax_names)} in JAX, got "
            f"{_listed(made)} from {', '.join(torch_names)}{tip or '; use transpose, reshape, split, join or stack'}"
        )


def _listed(shapes: Iterable[tuple[int, ...]]) -> str:
    return ", ".join("x".join(map(str, shape)) or "scalar" for shape in shapes)


def _no_match(where: str, name: str, shapes: Shapes, side: str) -> str:
    near = ", ".join(difflib.get_close_matches(name, list(shapes), 3, 0.3)) or "none"
    return f"{where}: expected a parameter of the {side} module, got {name!r}, which is none; similar names: {near}"


def _check_complete(links: Sequence[Link], torch: Shapes, jax: Shapes, ignored: Sequence[re.Pattern]) -> None:
    """Raise a ValueError if a parameter of either side has no counterpart, or two."""
    for side, shapes, names in (
        ("PyTorch", torch, [name for link in links for name in link.torch_names]),
        ("JAX", jax, [name for link in links for name in link.jax_names]),
    ):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"names: expected each parameter once, got {', '.join(twice)} of {side} twice")
        missing = [n for n in shapes if n not in names and not any(pattern.fullmatch(n) for pattern in ignored)]
        if missing:
            more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
            raise ValueError(
                f"names: expected a counterpart for every parameter, got none for {', '.join(missing[:8])}{more} of "
                f"{side}; add them to names (suggest_names proposes a mapping), or to ignore"
            )
