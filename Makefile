# make demo      train one model in both backends, side by side
# make test      what CI runs                     make check     lint, types, fast tests
# make test-all  everything, notebooks included   make bench     speed ratios
# make install   only the environment             make clean     remove what was made
# make bench-recompute  memory and time of every way of recomputing
# make bench-offload    what offload moves, keeps and hides
# make bench-delta-rule the chunked delta rule beside the recurrence
# make bench-approximate-cp  what states that are not passed on whole cost, and how wrong they are
# make bench-step-time  steps beside what the roofline predicts from measured rates
# make bench-cp         context parallelism: bytes, step time, wire error, a long sequence
# make bench-zigzag     attention of context ranks, contiguous and zigzag: products and step time
# make bench-wavefront  microbatches that follow one another over context ranks beside exchanges in step
# make bench-pipeline   pipeline steps beside what their tables predict and beside PyTorch's own
# make bench-generated-schedule  a schedule made for its costs beside the best one with a name
# make composition     compositions of all features beside the plain model, in both backends: 15 minutes
# make fuzz FUZZ_MINUTES=30  random programs of what users write, held against the plain program, as long as given
# make drill          training runs broken on purpose, and what came of each
# make kernels-report   registers, spills and shared memory of every kernel, compiled without a GPU
# make test-page        the page of a plan in a headless Chromium, which has to be there: apt-get install chromium
# make test-gpu         kernels compiled and run        make bench-gpu  and measured; both need one GPU
#
# The first target that needs it makes .venv. TORCH=cuda takes the CUDA build of PyTorch and the JAX
# GPU plugin; PYTHON names another interpreter (3.11 or later).

PYTHON ?= python3
TORCH ?= $(if $(wildcard .venv/installed-cuda),cuda,cpu)
TORCH_VERSION := 2.13.0
# PyTorch's CPU builds; used for torch alone, and only where no build of that version lies on disk.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

VENV := .venv
# One stamp a variant: asking for the other one installs it.
INSTALLED := $(VENV)/installed-$(TORCH)
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
PYTEST := $(BIN)/python -m pytest

# Busy BLAS threads on few cores slow each other down many times over.
export OMP_NUM_THREADS := 1
# Compiled XLA programs are kept between test runs.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.jax_cache

ifeq ($(TORCH),cuda)
CONSTRAINTS := constraints-cuda.txt
EXTRA := ,gpu
INSTALL_TORCH := $(PIP) install -q -c $(CONSTRAINTS) torch==$(TORCH_VERSION)
INSTALL_PLUGIN :=
else
CONSTRAINTS := constraints.txt
EXTRA :=
INSTALL_TORCH := $(PIP) install -q --no-index --no-deps torch==$(TORCH_VERSION) 2>/dev/null \
	|| $(PIP) install -q --no-deps --index-url $(TORCH_CPU_INDEX) torch==$(TORCH_VERSION)
# Without what it needs on a GPU: jax-triton compiles kernels by one small library in it, on any machine.
INSTALL_PLUGIN := $(PIP) install -q --no-deps -c $(CONSTRAINTS) jax-cuda13-plugin
endif

# On a machine that has everything already: make test-gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
GPU_INSTALLED := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(INSTALLED))
ON_GPU := JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false $(GPU_PYTHON)

.PHONY: fuzz install demo check test test-all test-gpu bench bench-recompute bench-pipeline bench-offload bench-delta-rule bench-cp bench-approximate-cp bench-step-time bench-gpu kernels-report composition drill clean bench-generated-schedule test-page bench-zigzag bench-wavefront

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@echo "making $(VENV): about a minute, 2 GB"
	$(PYTHON) -m venv --clear $(VENV)
	$(INSTALL_TORCH)
	$(PIP) install -q -c $(CONSTRAINTS) -e '.[dev$(EXTRA)]'
	$(INSTALL_PLUGIN)
	@touch $@

install: $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/diptych compare --output-dir runs/demo

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(PYTEST) -n 2 -m "not slow and not notebook and not multiprocess and not thorough" --hypothesis-profile=fast

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(PYTEST) -n 2 -m "not slow"

test-all: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(PYTEST) -n 2 -m "not alone" --hypothesis-profile=all --durations=40
	$(PYTEST) -m alone

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.mhc

bench-recompute: $(INSTALLED)
	$(BIN)/python -m benchmarks.recompute

bench-pipeline: $(INSTALLED)
	$(BIN)/python -m benchmarks.pipeline

bench-generated-schedule: $(INSTALLED)
	$(BIN)/python -m benchmarks.generated_schedule

bench-offload: $(INSTALLED)
	$(BIN)/python -m benchmarks.offload

bench-delta-rule: $(INSTALLED)
	$(BIN)/python -m benchmarks.delta_rule

bench-approximate-cp: $(INSTALLED)
	$(BIN)/python -m benchmarks.approximate_context

bench-step-time: $(INSTALLED)
	$(BIN)/python -m benchmarks.step_time

bench-cp: $(INSTALLED)
	$(BIN)/python -m benchmarks.context

bench-zigzag: $(INSTALLED)
	$(BIN)/python -m benchmarks.zigzag

bench-wavefront: $(INSTALLED)
	$(BIN)/python -m benchmarks.wavefront

FUZZ_MINUTES ?= 10
fuzz: $(INSTALLED)
	$(BIN)/python -m tests.fuzz --minutes $(FUZZ_MINUTES)

drill: $(INSTALLED)
	$(BIN)/python -m tests.faults.__main__

kernels-report: $(INSTALLED)
	$(BIN)/python -m benchmarks.kernels_report

composition: $(INSTALLED)
	$(BIN)/python -m tests.composition_report

test-page: $(INSTALLED)
	$(BIN)/python -m tests.planner.browser
	$(PYTEST) tests/planner/test_page.py tests/planner/test_page_file.py tests/planner/test_page_browser.py

test-gpu: $(GPU_INSTALLED)
	$(ON_GPU) -m pytest -m gpu tests

bench-gpu: $(GPU_INSTALLED)
	$(ON_GPU) -m benchmarks.kernels
	$(ON_GPU) -m benchmarks.delta_rule_kernels
	$(ON_GPU) -m benchmarks.offload

clean:
	rm -rf $(VENV) runs build .jax_cache .pytest_cache .hypothesis .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
