"""Generate docs/api.md: signatures and first sentences of the public names of both backends.

    python -m docs.generate.api          (updates the page)

The public names of a module are those of ``__all__``, or else the functions and classes that it defines. Methods follow
their class.
"""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

PAGE = Path(__file__).parents[1] / "api.md"
BACKENDS = {"PyTorch": "reference_torch", "JAX": "jax_impl"}
SHARED = (
    "diptych.plans.config",
    "diptych.plans.model.layers",
    "diptych.plans.model.parameters",
    "diptych.plans.schedule.partition",
    "diptych.plans.schedule.placement",
    "diptych.plans.schedule.actions",
    "diptych.plans.schedule.named",
    "diptych.plans.schedule.csv",
    "diptych.plans.schedule.simulate",
    "diptych.planner.generate",
    "diptych.planner.stage_costs",
    "diptych.plans.schedule.lockstep",
    "diptych.plans.recompute",
    "diptych.planner.memory",
    "diptych.planner.step_time",
    "diptych.planner.search",
    "diptych.plans.offload",
    "diptych.plans.context.sequences",
    "diptych.plans.context.zigzag",
    "diptych.plans.model.data",
    "diptych.plans.training",
    "diptych.plans.checkpoint",
    "diptych_kernels.api",
)
"""Modules that do not belong to a backend."""
MODULES = (
    "",
    "ops",
    "modules",
    "doubly_stochastic",
    "hyper_connections",
    "delta_rule",
    "linear_attention",
    "context_parallel",
    "transformer",
    "decoding",
    "recompute",
    "pipeline",
    "offload",
    "groups",
    "saving",
    "train",
)
"""Modules of a backend; the empty name is the package itself."""
HEAD = """# API reference

This page lists every public name with its arguments and the first sentence of its docstring.
`python -m docs.generate.api` writes it from the code, and a test compares both. `help(name)` prints types, shapes and
errors. "The same" in the JAX column means that the arguments equal those of PyTorch. Methods follow their class. The
call of a module is `forward` in PyTorch and `__call__` in JAX. `diptych train --help` lists the settings.

"""
SAME = "the same"
ABSENT = ""
MOST_ARGUMENTS = 14
"""Longer lists of arguments, such as those of settings, are shortened."""
SHORTENED_ARGUMENTS = 3
"""Length of a shortened list."""


class Entry(NamedTuple):
    """A public name."""

    arguments: str | None
    """Arguments of a function or class; None for other values."""
    sentence: str


def page() -> str:
    """Return the text of the page."""
    parts = [HEAD, "## Shared plans\n\n"]
    for name in SHARED:
        entries = entries_of(importlib.import_module(name))
        parts.append(_table(f"### `{name}`", ("name", "description"), map(_row, entries, entries.values())))
    parts.append("## Backends\n\n")
    for module in MODULES:
        sides = [entries_of(importlib.import_module(_module(package, module))) for package in BACKENDS.values()]
        title = " and ".join(f"`{_module(package, module)}`" for package in BACKENDS.values())
        names = list(dict.fromkeys(name for side in sides for name in side))
        rows = (_mirrored_row(name, *(side.get(name) for side in sides)) for name in names)
        parts.append(_table(f"### {title}", ("name", *BACKENDS, "description"), rows))
    return "".join(parts).rstrip("\n") + "\n"


def entries_of(module: ModuleType) -> dict[str, Entry]:
    """Return the public names of a module, including methods, in order."""
    listed = getattr(module, "__all__", None)
    found: dict[str, Entry] = {}
    for name in _defined(module) if listed is None else listed:
        value = getattr(module, name)
        if not (inspect.isclass(value) or inspect.isroutine(value) or hasattr(value, "__wrapped__")):
            found[name] = Entry(None, _sentence(_constant_docs(module, name)))
            continue
        found[name] = Entry(_arguments(value), _sentence(value.__doc__ or ""))
        if inspect.isclass(value) and not issubclass(value, BaseException):
            found |= {f"{name}.{method}": entry for method, entry in _methods(value)}
    return found


def _module(package: str, module: str) -> str:
    return f"{package}.{module}" if module else package


def _defined(module: ModuleType) -> list[str]:
    """Return the functions and classes that a module defines, in the order of its file."""
    nodes = ast.parse(inspect.getsource(module)).body
    names = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [name for name in names if not name.startswith("_")]


def _methods(cls: type) -> Iterator[tuple[str, Entry]]:
    """Yield the public methods and properties that a class itself defines, including its call."""
    for name, value in vars(cls).items():
        plain = value.__func__ if isinstance(value, staticmethod | classmethod) else value
        if isinstance(value, property):
            if not name.startswith("_"):
                yield name, Entry(None, _sentence(value.__doc__ or ""))
        elif inspect.isfunction(plain) and plain.__doc__ and (not name.startswith("_") or name == "__call__"):
            called = "__call__" if name == "forward" else name
            yield called, Entry(_arguments(plain, not isinstance(value, staticmethod)), _sentence(plain.__doc__))


def _arguments(value: Any, bound: bool = False) -> str:
    """Return the arguments without types; of a class, those of its constructor."""
    if inspect.isclass(value):
        if issubclass(value, BaseException):
            return "message"
        own = vars(value).get("__init__")
        value, bound = (own, True) if inspect.isfunction(own) else (value, False)
    parameters = [*inspect.signature(value).parameters.values()][int(bound) :]
    words = [*_separated(parameters)]
    return ", ".join(words if len(words) <= MOST_ARGUMENTS else [*words[:SHORTENED_ARGUMENTS], "..."])


def _separated(parameters: list[inspect.Parameter]) -> Iterator[str]:
    """Yield each parameter with its default, and a star before the first keyword."""
    starred = False
    for parameter in parameters:
        if parameter.kind is parameter.KEYWORD_ONLY and not starred:
            yield "*"
        starred |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={_default(parameter.default)}"
        yield f"{prefix}{parameter.name}{default}"


def _default(value: Any) -> str:
    """Return the source of a default, or dots if it has no readable source."""
    text = repr(value)
    return "..." if " at 0x" in text or text.startswith("<") else text


def _sentence(docs: str) -> str:
    """Return the first sentence on one line."""
    paragraph = " ".join(inspect.cleandoc(docs).split("\n\n")[0].split())
    end = re.search(r"(?<!e\.g)\.(?= [A-Z])", paragraph)
    return (paragraph if end is None else paragraph[: end.end()]).replace("|", "\\|").replace("``", "`")


@cache
def _docs_of_constants(name: str) -> dict[str, str]:
    """Return the string below each assignment of a module, by the assigned name."""
    nodes = ast.parse(inspect.getsource(importlib.import_module(name))).body
    found = {}
    for node, below in pairwise(nodes):
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(below, ast.Expr):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(below.value, ast.Constant) and isinstance(target, ast.Name):
                found[target.id] = str(below.value.value)
    return found


def _constant_docs(module: ModuleType, name: str) -> str:
    """Return the docstring of a constant from the module that assigns it."""
    for node in ast.parse(inspect.getsource(module)).body:
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]:
            return _docs_of_constants(str(node.module)).get(name, "")
    return _docs_of_constants(module.__name__).get(name, "")


def _code(name: str, arguments: str | None) -> str:
    return f"`{name}`" if arguments is None else f"`{name}({arguments})`".replace("|", "\\|")


def _row(name: str, entry: Entry) -> tuple[str, ...]:
    return _code(name, entry.arguments), entry.sentence


def _mirrored_row(name: str, torch: Entry | None, jax: Entry | None) -> tuple[str, ...]:
    """Return the row of a name with the arguments in both backends."""
    sides = [
        ABSENT if side is None else "a value" if side.arguments is None else f"`({side.arguments})`"
        for side in (torch, jax)
    ]
    if torch is not None and jax is not None and torch.arguments == jax.arguments:
        sides[1] = SAME
    first = torch or jax
    assert first is not None, "a name belongs to at least one backend"
    return f"`{name}`", *(side.replace("|", "\\|") for side in sides), first.sentence


def _table(title: str, head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [title, "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n\n"


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
