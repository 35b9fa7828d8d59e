"""The machine code of kernels from the oldest supported Triton, which has another compiler and assembler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.everywhere.torch_models import TORCHVISION

ROOT = Path(__file__).parents[2]
OLDEST = TORCHVISION.parent / "oldest-triton"
TESTS = [
    "tests/kernels/test_ahead.py::test_nothing_spills_at_production_shapes",
    "tests/kernels/test_ahead.py::test_programs_fit_a_multiprocessor",
    "tests/kernels/test_ahead.py::test_report_of_the_delta_rule_is_what_this_triton_says",
    "tests/kernels/test_ahead.py::test_scans_load_matrices_in_wide_pieces",
    "tests/kernels/test_machine_code.py::test_tensors_move_in_accesses_of_sixteen_bytes",
]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not OLDEST.exists(), reason="needs make .venv/installed-peers")
def test_machine_code_of_the_oldest_triton():
    paths = [OLDEST, ROOT, ROOT / "kernels"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", *TESTS]
    version = subprocess.run(
        [sys.executable, "-c", "import triton; print(triton.__version__)"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert version.stdout.startswith("3.6."), version.stdout
    done = subprocess.run(command, capture_output=True, text=True, timeout=1180, cwd=ROOT, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
