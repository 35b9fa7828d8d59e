"""Parsing of the command line, and error messages with flags in place of variable names."""

import contextlib
import difflib
import functools
import io
import re
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, get_args, get_type_hints

import tyro

from diptych.plans.config import DataConfig, TrainConfig, TransformerConfig
from parity.cli.commands import COMMANDS, Command, UnreadableScheduleError, with_configuration
from parity.cli.config_file import with_config_file

GROUPS = {"model": TransformerConfig, "train": TrainConfig, "data": DataConfig}
"""Fields of a command that are configurations; their own fields are flags."""
POSITIONAL = {
    "checkpoint": "a checkpoint, or a run's folder",
    "folder": "a Hugging Face folder",
    "runs": "folders given to train --save",
    "torch_side": "two functions, TORCH_FILE.py:FUNCTION JAX_FILE.py:FUNCTION",
    "jax_side": "a second function, JAX_FILE.py:FUNCTION",
}
"""Positional settings, with descriptions."""
OTHER_FLAGS = {"model_source": "--model"}
"""Flags whose name is not that of their setting."""
OTHER_NAMES = {
    "group_size": "microbatch_group_size_per_vp_stage",
    "pp_size": "pipeline_model_parallel_size",
    "stages_per_rank": "virtual_pipeline_model_parallel_size",
}
"""Arguments of functions in plans, and the settings that they come from."""
DESCRIPTION = """One training system in PyTorch and in JAX: compare both, train either, inspect runs.

Settings can be given in a TOML file: diptych train --config run.toml; flags override the file. diptych COMMAND
--help explains every flag of a command:
"""


@functools.cache
def flags_of(command: type) -> dict[str, Any]:
    """Return the settings of a command by field name, with their types."""
    hints = get_type_hints(command)
    found = {}
    for each in fields(command):
        if each.name in GROUPS:
            found |= flags_of(GROUPS[each.name])
        elif each.init and each.name not in POSITIONAL:
            found[each.name] = hints[each.name]
    return found


def flag(name: str) -> str:
    """Return the flag of a setting."""
    return OTHER_FLAGS.get(name) or f"--{name.replace('_', '-')}"


@functools.cache
def description() -> str:
    """Return the text of ``diptych --help``: the flags of every command; shared flags are listed once."""
    shared = {name: [each for each, kind in COMMANDS.items() if name in flags_of(kind)] for name in _all_settings()}
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, commands in shared.items():
        groups.setdefault(tuple(commands), []).append(flag(name))
    lines = [f"{', '.join(commands)}: {' '.join(names)}" for commands, names in groups.items()]
    return DESCRIPTION + "\n\n" + "\n\n".join(lines)


def parse(arguments: list[str]) -> Any:
    """Return the command of a command line.

    Raises:
        ValueError: the command line is invalid; the message is one line with the flag and the expected value.
        SystemExit: help was requested and printed.
    """
    captured = io.StringIO()
    arguments = with_config_file(arguments)
    name = arguments[0] if arguments and arguments[0] in COMMANDS else None
    _check_names(name, arguments)
    try:
        with contextlib.redirect_stderr(captured):
            command = tyro.cli(Command, prog="diptych", description=description(), args=arguments)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise ValueError(_explained(_first_message(captured.getvalue()), name)) from None
    except UnreadableScheduleError as error:
        raise ValueError(f"pipeline_schedule_file: expected a schedule that runs, got {error}") from None
    known = flags_of(COMMANDS[name]) if name is not None else {}
    words = {argument.split("=")[0].replace("_", "-") for argument in arguments}
    return with_configuration(command, {each for each in known if words.intersection(_spellings({each: known[each]}))})


def in_flags(message: str, command: str | None) -> str:
    """Return a message with the names of settings written as the flags of a command; quoted text stays as it is."""
    known = flags_of(COMMANDS[command]) if command in COMMANDS else _all_settings()
    names = {name: flag(name) for name in known if "_" in name}
    names |= {name: flag(setting) for name, setting in OTHER_NAMES.items() if setting in known}
    if "num_microbatches" not in known:
        message = re.sub(r"num_microbatches=(\d+)", r"\1 microbatches", message)
        names["num_microbatches"] = "the number of microbatches (--global-batch-size, --micro-batch-size)"
    pattern = re.compile(
        r"'[^']*'|(?<![\w./-])(?<!config\.json, )(?:" + "|".join(sorted(names, key=len, reverse=True)) + r")(?![\w./])"
    )
    message = pattern.sub(lambda found: names.get(found[0], found[0]), message)
    first = re.match(r"(\w+): ", message)
    return f"--{message}" if first and first[1] in known else message


@functools.cache
def _all_settings() -> dict[str, Any]:
    return {name: kind for command in COMMANDS.values() for name, kind in flags_of(command).items()}


def _check_names(command: str | None, arguments: list[str]) -> None:
    """Check the names of command and flags; the error for an unknown name suggests a similar one."""
    if arguments and command is None and not arguments[0].startswith("-"):
        suggestion = _suggestion(arguments[0], list(COMMANDS))
        raise ValueError(f"expected a command, one of {', '.join(COMMANDS)}, got {arguments[0]!r}{suggestion}")
    if command is None:
        return
    known = {*_spellings(flags_of(COMMANDS[command])), "--help", "-h"}
    for argument in arguments[1:]:
        name = argument.split("=")[0].replace("_", "-")
        if not re.match(r"--?[A-Za-z]", name) or name in known or name.lower() in ("-inf", "-nan", "-infinity"):
            continue
        others = [each for each, kind in COMMANDS.items() if name in _spellings(flags_of(kind))]
        suggestion = (
            f"; it is a flag of diptych {' and '.join(others)}" if others else _suggestion(name, sorted(known - {"-h"}))
        )
        raise ValueError(
            f"{name}: expected a flag of diptych {command}, got an unknown one{suggestion} (diptych {command} --help "
            "lists all)"
        )


def _spellings(settings: dict[str, Any]) -> Iterator[str]:
    for name, kind in settings.items():
        yield flag(name)
        if kind is bool or bool in get_args(kind):
            yield f"--no-{flag(name)[2:]}"


def _suggestion(name: str, known: list[str]) -> str:
    """Return a suggestion for an unknown name."""
    found = difflib.get_close_matches(name, known, n=1, cutoff=0.6) or [each for each in known if each.startswith(name)]
    return f"; did you mean {found[0]}?" if found else ""


def _explained(message: str, command: str | None) -> str:
    """Return tyro's message in the form of this project's messages."""
    hint = f" (diptych {command} --help lists all flags)" if command else " (diptych --help lists the commands)"
    if ours := re.match(r"Error parsing [A-Za-z]\w*: (.*)", message):
        return ours[1]
    if value := re.match(r"Error parsing (\S+?): (?:invalid literal for|could not convert).*?: (.*)", message):
        kind = "an integer" if "invalid literal" in message else "a number"
        return f"{value[1]}: expected {kind}, got {value[2]}{hint}"
    if several := re.match(r"Error parsing (\S+?): no type matching .*? instantiated from \[(.*?)\]\.  Got", message):
        kind = "an integer or None" if "<class 'int'>" in message else "a number or None"
        kind = kind if re.search(r"<class '(int|float)'>", message) else "another value"
        return f"{several[1]}: expected {kind}, got {several[2]}{hint}"
    if choice := re.match(r"invalid choice (.*?) for argument '(\S+)'. Expected one of \((.*)\)\.?$", message):
        allowed = ", ".join(sorted(each.strip(" '") for each in choice[3].split(",")))
        return f"{choice[2]}: expected one of {allowed}, got {choice[1]}{hint}"
    if missing := re.match(r"Missing value for argument '([^']*)'", message):
        return f"{missing[1].split('/')[0]}: expected a value, got none{hint}"
    if other := re.match(r"Unrecognized (?:or misplaced )?options: (.*?)(?:  Arguments are applied.*)?$", message):
        given = re.sub(r" \(applied to [^)]*\)", "", other[1]).strip()
        return f"expected only flags and their values, got {given}{hint}"
    if re.match(r"Missing from diptych", message) and command in ("sample", "info", "locate"):
        setting, given = ("torch_side", "fewer") if command == "locate" else ("checkpoint", "none")
        return f"{command}: expected {POSITIONAL[setting]}, got {given}{hint}"
    if re.match(r"Expected one of \{", message):
        return f"expected a command, one of {', '.join(COMMANDS)}, got none{hint}"
    return f"{message}{hint}"


def _first_message(box: str) -> str:
    """Return the first part of tyro's framed error message as one line."""
    lines: list[str] = []
    for line in box.splitlines()[1:]:
        content = line.strip(" │|")
        if content.startswith(("─", "╰", "╭", "-----", "+-")):  # a frame or a rule, in ASCII too
            if lines:
                break
            continue
        lines.append(content)
    return re.sub(r"^Error parsing __\S+: ", "", " ".join(lines))
