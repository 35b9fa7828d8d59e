"""Examples of techniques in models of others run, and assert what they claim."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.multiprocess
def test_gpt_2_of_transformers_is_trained_in_a_pipeline_with_replicas():
    pytest.importorskip("transformers")
    command = [sys.executable, "examples/pipeline_gpt2.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "steps on four processes" in done.stdout


@pytest.mark.multiprocess
def test_a_qwen3_5_model_of_transformers_is_context_parallel():
    pytest.importorskip("transformers")
    command = [sys.executable, "examples/context_parallel_qwen3_5.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "gradients within" in done.stdout
