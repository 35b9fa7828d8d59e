"""Selection of submodules by patterns of their dotted names, for techniques that any model can use."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a pattern matches.

    Args:
        pattern: dotted name, in which ``*`` stands for any text without a dot.
        names: dotted names of submodules.
    """
    expression = re.compile(re.escape(pattern).replace(r"\*", "[^.]+"))
    return [name for name in names if expression.fullmatch(name)]


def select(argument: str, patterns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the names that any of several patterns matches, in the order of the model.

    Args:
        argument: name of the argument, for messages.
        patterns: patterns as in matching.
        names: names of all submodules.

    Raises:
        TypeError: patterns is a text or a mapping, or an entry is no text.
        ValueError: there is no pattern, one matches nothing, or a match lies inside of another.
    """
    if isinstance(patterns, str | Mapping) or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"{argument}: expected a list of patterns, got {patterns!r}")
    if not patterns:
        raise ValueError(f"{argument}: expected at least one pattern, got none")
    found = set()
    for pattern in patterns:
        matches = matching(pattern, names)
        if not matches:
            raise ValueError(
                f"{argument}: expected patterns of submodules, got {pattern!r}, which matches none"
                f"{_near(pattern, names)}"
            )
        found.update(matches)
    chosen = [name for name in names if name in found]
    for name in chosen:
        outer = next((other for other in chosen if name != other and (not other or name.startswith(f"{other}."))), None)
        if outer is not None:
            raise ValueError(
                f"{argument}: expected separate submodules, got {outer or 'the whole'} and {name} inside it; name one "
                "of them"
            )
    return chosen


def select_within(
    argument: str, patterns: Mapping[str, Sequence[str]], names: Sequence[str]
) -> dict[str, tuple[str, ...]]:
    """Return the chosen submodules of each chosen block, by the name of the block.

    Args:
        argument: name of the argument, for messages.
        patterns: patterns of submodules by patterns of the blocks that contain them; the former are names within the
            block.
        names: names of all submodules of the model; the empty name is the model itself.

    Returns:
        Full names of the submodules by full name of the block, in the order of the model.

    Raises:
        TypeError: patterns is no mapping from texts to lists of texts.
        ValueError: a pattern matches nothing, or a match lies inside of another. Blocks without submodules, which a
            pipeline stage has in place of others' blocks, match nothing if another block matches.
    """
    if not isinstance(patterns, Mapping):
        raise TypeError(
            f"{argument}: expected a mapping from patterns of blocks to patterns of their submodules, such as "
            f"{{'blocks.*': ['norm', 'activation']}}, got {patterns!r}"
        )
    chosen = select(argument, [*patterns], names)
    found = {}
    for block in chosen:
        prefix = f"{block}." if block else ""
        inner = [name.removeprefix(prefix) for name in names if name != block and name.startswith(prefix)]
        if not inner and any(name.startswith(f"{other}.") for other in chosen if other for name in names):
            continue
        wanted = [p for outer, each in patterns.items() if matching(outer, [block]) for p in _texts(argument, each)]
        found[block] = tuple(
            f"{prefix}{name}" for name in select(f"{argument}, {block or 'whole model'}", wanted, inner)
        )
    return found


def _texts(argument: str, patterns: Sequence[str]) -> list[str]:
    if isinstance(patterns, str):
        raise TypeError(f"{argument}: expected a list of patterns, got {patterns!r}")
    return [*patterns]


def _near(pattern: str, names: Sequence[str]) -> str:
    """Return the names that a wrong pattern may have meant."""
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5) or [*names[:5]]
    return f" of {', '.join(near)}" + " ..." * (len(names) > len(near)) if near else ", since there are no submodules"
