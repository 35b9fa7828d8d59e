"""Settings of every test: 64-bit JAX, one torch thread, shapes checked at every public function."""

import gc
import os
import resource
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("DIPTYCH_TUNE", "0")  # nothing is measured, nor written to the user's cache

COMPILING = ("XLA_FLAGS", "JAX_DISABLE_MOST_OPTIMIZATIONS")
GIVEN = {name: os.environ.get(name) for name in COMPILING}
"""How XLA was asked to compile: so notebooks are run, as a reader runs them."""
# Tests compile more than they compute, so they compile fast rather than well, in processes they start as well.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
if version("jax").startswith("0.10."):  # XLA ends a process for a flag it does not know
    os.environ["XLA_FLAGS"] = (
        f"{GIVEN['XLA_FLAGS'] or ''} --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    )

from tests.annotations import enforce_annotations  # noqa: E402

enforce_annotations("reference_torch", "jax_impl")  # before they are imported

from reference_torch.rank_pool import preload  # noqa: E402

preload("tests.everywhere.pipeline_jobs")  # imports nearly all that ranks need: 4 s once instead of 2 s in each

import hypothesis  # noqa: E402
import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

from tests.daily import VARIABLE, choose_part, left_out, of_other_parts  # noqa: E402

pytest_plugins = ["pytester"]

gc.freeze()  # the half million objects of the libraries, which the collector would otherwise visit again and again
if "PYTEST_XDIST_WORKER" in os.environ:
    gc.set_threshold(20_000, 20, 50)  # by default, a tenth of the time goes into visits of objects that are in use

torch.set_num_threads(1)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)

_common = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow], "print_blob": True}
# The same examples in every run of make check and make test; make test-all draws new ones.
hypothesis.settings.register_profile("fast", max_examples=8, derandomize=True, **_common)
hypothesis.settings.register_profile("test", max_examples=16, derandomize=True, **_common)
hypothesis.settings.register_profile("all", max_examples=20, **_common)
hypothesis.settings.load_profile("test")


LONG = 600.0
"""Seconds a test may take that is begun early, so that no worker is left with one at the end."""


@pytest.fixture
def unchecked_shapes():
    """Switch off the annotation checks, which take time in short steps and draw from Python's random generator."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="module")
def few_rounds():
    """Three rounds of random numbers, not ten, in both backends: masks still depend on all they should.

    Ten of them take JAX half its compiling. That they are right is tested where this is not used.
    """
    from tests.backends import rounds

    with rounds(3):
        yield


@pytest.fixture
def compiled_well():
    """Where operations or bytes of a compiled program are counted, or programs as users run them are meant."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def managers():
    """Makes managers of a model's layers, or of a list of layers, and closes them."""
    from reference_torch.offload import TensorOffloadManager

    made: list[TensorOffloadManager] = []

    def make(model, n: int = 1, away: bool = True, **more) -> TensorOffloadManager:
        manager = TensorOffloadManager(num_prefetch_layers=n, **more)
        made.append(manager)
        for number, layer in enumerate(getattr(model, "layers", model)):
            manager.register_layer(number, layer)
        if away:
            manager.offload_all_layers()
        manager.trace = []
        return manager

    yield make
    for manager in made:
        manager.close()


def _long_ones_first(items: list[pytest.Item]) -> None:
    """Put the longest tests at the beginning of what two workers are given first: an eighth of all tests each."""

    def most(item: pytest.Item) -> float:
        mark = item.get_closest_marker("timeout")
        return mark.args[0] if mark else 0.0

    long = sorted((item for item in items if most(item) >= LONG), key=most, reverse=True)
    short = [item for item in items if most(item) < LONG]
    place = max(0, len(items) // 8 - len(long[::2]))
    items[:] = [*long[::2], *short[:place], *long[1::2], *short[place:]]


class _Daily:
    """Marks as slow what make test leaves out, before -m selects."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items):
        items = [item for item in items if not item.get_closest_marker("slow")]
        for item, is_left_out in zip(items, left_out([item.nodeid for item in items]), strict=True):
            if is_left_out:
                item.add_marker(pytest.mark.slow)


class _Parts:
    """Leaves out what other parts of make test-all have, and says which part this is."""

    def __init__(self, part: str):
        self.part = part

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config, items):
        are_slow = [item.get_closest_marker("slow") is not None for item in items]
        are_others = of_other_parts([item.nodeid for item in items], self.part, are_slow)
        config.hook.pytest_deselected(items=[item for item, other in zip(items, are_others, strict=True) if other])
        items[:] = [item for item, other in zip(items, are_others, strict=True) if not other]

    def pytest_report_header(self):
        if self.part:
            return f"part {self.part} of the slow series; {VARIABLE}=all runs them whole (tests/daily.py)"


class _Compiled:
    """Drops the programs that JAX has compiled, all of which it keeps, after a module that has left a gibibyte more."""

    def __init__(self):
        self.limit = self.resident() + 2**30

    def resident(self) -> int:
        """Return the bytes of this process in memory."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_teardown(self, item, nextitem):
        if nextitem is not None and nextitem.path != item.path and self.resident() > self.limit:
            jax.clear_caches()
            gc.collect()
            self.limit = self.resident() + 2**30


def pytest_configure(config):
    """Register the plugins of tests.daily."""
    config.pluginmanager.register(_Parts(choose_part(config.getoption("hypothesis_profile", None) == "all")))
    config.pluginmanager.register(_Compiled())
    config.pluginmanager.register(_Daily())  # called first: its marks do not depend on the part


@pytest.hookimpl(trylast=True)  # of what -m leaves
def pytest_collection_modifyitems(items):
    """The longest tests are begun early. Those that need a GPU are skipped, by name, where there is none."""
    _long_ones_first(items)
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
