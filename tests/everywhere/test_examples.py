"""Examples of techniques in models of others run, and assert what they claim."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRINTS = {
    "pipeline_nnx": "steps on four devices",
    "pipeline_gpt2": "steps on four processes",
    "context_parallel_qwen3_5": "gradients within",
}


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", PRINTS)
def test_an_example_runs(name):
    pytest.importorskip("transformers")
    command = [sys.executable, f"examples/{name}.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert PRINTS[name] in done.stdout
