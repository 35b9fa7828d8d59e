"""List the benchmarks, or run one: ``python -m benchmarks [NAME [ARGUMENTS]]``, ``make bench [NAME=...]``."""

import ast
import runpy
import sys
from pathlib import Path

from parity.cli.output import standard_output


def benchmarks() -> dict[str, str]:
    """Return the first line of each benchmark's docstring, by name."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        source = path.read_text()
        if '__name__ == "__main__"' in source:
            found[path.stem] = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return found


def print_list(known: dict[str, str]) -> int:
    """Print the names and descriptions of benchmarks.

    Returns:
        The exit code: 0, also if the reader closes standard output early; 1 if standard output fails otherwise.
    """
    with standard_output() as output:
        print("make bench NAME=<name>, one of:\n")
        for name, line in known.items():
            print(f"    {name:22} {line}")
        output.flush()
    if output.failure is None or isinstance(output.failure, BrokenPipeError):
        return 0
    print(f"benchmarks: standard output: {output.failure.strerror or output.failure}", file=sys.stderr)
    return 1


def main(arguments: list[str]) -> int:
    """Run the benchmark that the first argument names and pass the other arguments to it; without arguments, list all.

    Returns:
        The exit code: 0; 1 if standard output fails; 2 if the name is unknown.
    """
    known = benchmarks()
    if not arguments:
        return print_list(known)
    name, *rest = arguments
    name = name.replace("-", "_")
    if name not in known:
        print(f"NAME: expected one of {', '.join(known)}, got {name!r}", file=sys.stderr)
        return 2
    sys.argv = [f"benchmarks.{name}", *rest]
    runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
