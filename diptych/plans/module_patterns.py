"""Selection of submodules by patterns of their dotted names, for techniques that any model can use."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a pattern matches.

    Args:
        pattern: dotted name, in which ``*`` stands for any non-empty text without a dot.
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
        ValueError: there is no pattern, one matches nothing, or a match is inside another.
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
        ValueError: a pattern matches nothing in all its blocks, nothing matches in one of them, or a match is inside
            another. Blocks without submodules, which a pipeline stage has in place of others' blocks, are left out if
            another block of the same pattern has some.
    """
    if not isinstance(patterns, Mapping):
        raise TypeError(
            f"{argument}: expected a mapping from patterns of blocks to patterns of their submodules, such as "
            f"{{'blocks.*': ['norm', 'activation']}}, got {patterns!r}"
        )
    chosen = select(argument, [*patterns], names)
    prefixes = {block: f"{block}." if block else "" for block in chosen}
    within = {
        block: [name.removeprefix(prefix) for name in names if name != block and name.startswith(prefix)]
        for block, prefix in prefixes.items()
    }
    wanted: dict[str, list[str]] = {}
    for outer, each in patterns.items():
        inner = _texts(argument, each)
        blocks = matching(outer, within)
        blocks = [block for block in blocks if within[block]] or blocks
        somewhere = {pattern for pattern in inner if any(matching(pattern, within[block]) for block in blocks)}
        for block in blocks:
            here = [pattern for pattern in inner if pattern not in somewhere or matching(pattern, within[block])]
            wanted.setdefault(block, []).extend(here or inner)
    found = {}
    for block in chosen:
        if block in wanted:
            submodules = select(f"{argument}, {block or 'whole model'}", wanted[block], within[block])
            found[block] = tuple(f"{prefixes[block]}{name}" for name in submodules)
    return found


def _texts(argument: str, patterns: Sequence[str]) -> list[str]:
    if isinstance(patterns, str):
        raise TypeError(f"{argument}: expected a list of patterns, got {patterns!r}")
    return [*patterns]


def _near(pattern: str, names: Sequence[str]) -> str:
    """Return the names that a wrong pattern may have meant."""
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5) or [*names[:5]]
    return f" of {', '.join(near)}" + " ..." * (len(names) > len(near)) if near else ", since there are no submodules"
