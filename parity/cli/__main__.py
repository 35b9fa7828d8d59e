"""Run the ``diptych`` command as ``python -m parity.cli``, as launchers and torchrun do."""

import os
import sys

from parity.cli.launch import is_one_of_several
from parity.cli.main import main

if __name__ == "__main__":
    code = main()
    if is_one_of_several():
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
        os._exit(code)  # a process group whose other ranks are gone may not let an interpreter end
    sys.exit(code)
