"""The machine code of kernels from the oldest supported Triton, which has another compiler and assembler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OLDEST = "3.6.0"
PLACE = Path(sys.prefix) / f"triton-{OLDEST}"
STREAMS = [
    "tests/kernels/test_ahead.py::test_nothing_spills_at_production_shapes",
    "tests/kernels/test_ahead.py::test_programs_fit_a_multiprocessor",
    "tests/kernels/test_machine_code.py::test_tensors_move_in_accesses_of_sixteen_bytes",
]
DELTA_RULE = [
    "tests/kernels/test_ahead.py::test_nothing_spills_on_b200_or_with_eight_streams",
    "tests/kernels/test_ahead.py::test_report_of_the_delta_rule_is_what_this_triton_says",
    "tests/kernels/test_ahead.py::test_scans_load_matrices_in_wide_pieces",
]


@pytest.mark.thorough
@pytest.mark.parametrize("tests", [STREAMS, pytest.param(DELTA_RULE, marks=pytest.mark.slow)], ids=["streams", "rule"])
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not PLACE.exists(), reason=f"needs make .venv/triton-{OLDEST}")
def test_machine_code_of_the_oldest_triton(tests):
    paths = [PLACE, ROOT, ROOT / "kernels"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "PYTEST_ADDOPTS": ""}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "", *tests]
    version = subprocess.run(
        [sys.executable, "-c", "import triton; print(triton.__version__)"],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    assert version.stdout.strip() == OLDEST
    done = subprocess.run(command, capture_output=True, text=True, timeout=1180, cwd=ROOT, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-10_000:] + done.stderr[-3000:]
    assert " passed" in done.stdout
