"""List the benchmarks, or run one: ``python -m benchmarks [NAME [ARGUMENTS]]``, ``make bench [NAME=...]``."""

import ast
import runpy
import sys
from pathlib import Path


def benchmarks() -> dict[str, str]:
    """Return the first line of every benchmark's docstring, by the benchmark's name."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("[!_]*.py")):
        source = path.read_text()
        if '__name__ == "__main__"' in source:
            found[path.stem] = (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]
    return found


def main(arguments: list[str]) -> int:
    """Run the benchmark that the first argument names, with the others as its arguments.

    Returns:
        0; 2 where there is no such benchmark.
    """
    known = benchmarks()
    if not arguments:
        print("make bench NAME=<name>, one of:\n")
        for name, line in known.items():
            print(f"    {name:22} {line}")
        return 0
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
