"""Matrix products on Hopper GPUs are assembled by a ptxas that does not miscompile them."""

import os
import threading

import pytest
from triton import knobs
from triton.backends.nvidia.compiler import get_ptxas, get_ptxas_version

from diptych_kernels import aot, assembler

HOPPER = (9, 0)
AMPERE = (8, 0)
SCAN = aot.delta_rule_production(tokens=128, heads=1)["scan.compose"].launch
SUM = aot.production(128, width=64)["activations.gelu_forward"].launch


@pytest.fixture(autouse=True)
def no_choice_remains():
    for known in (assembler.find_newest, get_ptxas_version):
        known.cache_clear()
    yield
    for known in (assembler.find_newest, get_ptxas_version):
        known.cache_clear()


@pytest.fixture
def ptxas(tmp_path):
    """Make a program that says that it is a ptxas of some version."""

    def make(version):
        path = tmp_path / f"ptxas-{version}"
        path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {version}, V{version}.1'\n")
        path.chmod(0o755)
        return str(path)

    return make


def test_the_newest_is_found(ptxas, monkeypatch):
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    paths = [ptxas("9.2"), ptxas("13.4"), "/missing/ptxas", ptxas("13.10"), ptxas("12.8")]
    monkeypatch.setattr(assembler, "_candidates", lambda: paths)
    assert assembler.find_newest() == ((13, 10), paths[3])


def test_triton_s_own_is_a_candidate(monkeypatch):
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    assert knobs.nvidia.ptxas.path in assembler._candidates()


def test_a_given_one_is_used(ptxas, monkeypatch):
    """By either of Triton's variables, of which it reads the second on Hopper since version 3.9."""
    monkeypatch.setenv("TRITON_PTXAS_PATH", ptxas("12.8"))
    assert assembler.find_newest().version == (12, 8)
    assembler.find_newest.cache_clear()
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", ptxas("13.1"))
    assert assembler.find_newest().version == (13, 1)


UNUSABLE = {
    "missing": None,
    "not executable": (b"#!/bin/sh\necho 'release 13.9, V13.9.1'\n", 0o644),
    "of another machine": (b"\x7fELF\x02\x01\x01" + bytes(60), 0o755),
    "without a version": (b"#!/bin/sh\necho none\n", 0o755),
    "with bytes that are no text": (b"#!/bin/sh\nprintf 'release 13.9, V13.9\\377\\376'\n", 0o755),
    "failing": (b"#!/bin/sh\nexit 3\n", 0o755),
}


@pytest.mark.parametrize("kind", UNUSABLE)
def test_one_that_does_not_run_is_left_out_and_named_if_it_was_given(kind, ptxas, tmp_path, monkeypatch):
    path = tmp_path / "ptxas"
    if UNUSABLE[kind] is not None:
        content, mode = UNUSABLE[kind]
        path.write_bytes(content)
        path.chmod(mode)
    monkeypatch.delenv("TRITON_PTXAS_PATH", raising=False)
    monkeypatch.setattr(assembler, "_candidates", lambda: [str(path), ptxas("13.1")])
    assert assembler.find_newest().version == (13, 1)
    assembler.find_newest.cache_clear()
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(path))
    with pytest.raises(RuntimeError, match=f"TRITON_PTXAS_PATH: expected a ptxas that runs, got {path}; correct or un"):
        assembler.find_newest()


def test_triton_s_own_is_found_in_a_folder_with_brackets(tmp_path, monkeypatch):
    own = tmp_path / "[env]" / "backends" / "nvidia" / "bin" / "ptxas"
    own.parent.mkdir(parents=True)
    own.touch()
    monkeypatch.setattr(assembler, "_places", lambda spec: [str(tmp_path / "[env]")])
    assert str(own) in assembler._candidates()


def test_old_ones_are_refused_for_products_on_hopper_only(ptxas, monkeypatch):
    monkeypatch.setenv("TRITON_PTXAS_PATH", ptxas("12.9"))
    with pytest.raises(RuntimeError, match=r"delta_rule.scan.compose: expected ptxas 13.0 or later, .* got 12.9 at"):
        assembler.for_launch(SCAN, HOPPER)
    with assembler.for_launch(SUM, HOPPER), assembler.for_launch(SCAN, AMPERE):
        pass


@pytest.mark.parametrize("before", [None, "13.1"])
def test_triton_uses_it_inside_the_context_only(ptxas, monkeypatch, before):
    monkeypatch.setenv("TRITON_PTXAS_PATH", ptxas("13.3"))
    settings = vars(knobs.nvidia)
    if before is not None:
        monkeypatch.setitem(settings, "ptxas_blackwell", ptxas(before))
        monkeypatch.setitem(settings, "ptxas", ptxas(before))
    monkeypatch.delenv("TRITON_PTXAS_BLACKWELL_PATH", raising=False)
    outside, environment, version = dict(settings), dict(os.environ), get_ptxas_version(90)
    for _ in range(2):
        with assembler.for_launch(SCAN, HOPPER):
            assert get_ptxas(90).version == "13.3"
            assert "13.3" in get_ptxas_version(90)
        assert settings == outside
        assert get_ptxas_version(90) == version
    assert dict(os.environ) == environment


def test_threads_that_overlap_restore_the_settings(ptxas, monkeypatch):
    monkeypatch.setenv("TRITON_PTXAS_PATH", ptxas("13.3"))
    before = dict(vars(knobs.nvidia))
    entered, left = threading.Event(), threading.Event()

    def second():
        with assembler.for_launch(SCAN, HOPPER):
            entered.set()
            left.wait(20)
            assert get_ptxas(90).version == "13.3"

    thread = threading.Thread(target=second)
    with assembler.for_launch(SCAN, HOPPER):
        thread.start()
        assert entered.wait(20)
    assert get_ptxas(90).version == "13.3"
    left.set()
    thread.join(20)
    assert dict(vars(knobs.nvidia)) == before


@pytest.mark.parametrize(("plugin", "capability", "is_refused"), [
    ("PJRT C API\ncuda 12090", "9.0", True),
    ("cuda 13000", "9.0", False),
    ("cuda 12090", "8.0", False),
    ("rocm 60000", "9.0", False),
])  # fmt: skip
def test_old_plugins_of_jax_are_refused(plugin, capability, is_refused):
    assembler.check_plugin(SUM, plugin, capability)
    if not is_refused:
        assembler.check_plugin(SCAN, plugin, capability)
        return
    with pytest.raises(RuntimeError, match=r"expected JAX's plugin for CUDA 13, .* got CUDA 12.9"):
        assembler.check_plugin(SCAN, plugin, capability)
