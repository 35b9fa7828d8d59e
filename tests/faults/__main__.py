"""Fault-injection tests on the command line.

    python -m tests.faults             (make faults: all cases; writes the table in docs/fault_injection.md)
    python -m tests.faults SIGTERM     (cases whose name has these words; writes nothing)

The exit code is 1 if any case is not as expected.
"""

import sys

from tests.faults.runner import main  # in a module of its own: a case's process imports it, and no __main__

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
