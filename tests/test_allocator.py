"""The allocator of the C library, in processes of their own, because its settings stay."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import numpy as np
from parity.cli.allocator import keep_freed_memory

if sys.argv[1] == "keep":
    assert keep_freed_memory()
for step in range(12):
    if step == 2:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(2**24)  # 128 MiB
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_kept_memory_is_not_faulted_in_again():
    faults = {}
    for way in ("keep", "default"):
        done = subprocess.run([sys.executable, "-c", PROGRAM, way], capture_output=True, text=True, check=True)
        faults[way] = int(done.stdout)
    assert faults["keep"] + 300 < faults["default"], faults  # 640 huge pages, or 330,000 small ones


def test_another_system_is_left_as_it_is(monkeypatch):
    from parity.cli import allocator

    monkeypatch.setattr(sys, "platform", "darwin")
    assert not allocator.keep_freed_memory()
