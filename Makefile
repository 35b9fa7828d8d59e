# make demo          train one model in both backends, side by side
# make check         lint, types and fast tests
# make test          what CI runs
# make test-all      all tests, including notebooks and packaging; of slow tests of many parameters the day's part
# make bench         list the benchmarks; NAME=... runs one
# make fuzz          random programs, compared with the plain program; FUZZ_MINUTES=30 sets the time
# make composition   random compositions of all features, compared with the plain model: 15 minutes
# make docs          build the site of README, docs and notebooks in build/site
# make faults        fault-injection tests: training runs that are broken on purpose
# make test-page     the page of a plan in a headless Chromium (apt-get install chromium)
# make test-gpu      compile and run the kernels; needs one GPU
# make bench-gpu     measure the kernels; needs one GPU
# make kernels-report   registers, instructions and estimated times of all kernels and of two other libraries
# make install       create the environment
# make clean         remove what the other targets created
#
# The first target that needs the environment creates .venv. TORCH=cuda installs the CUDA build of PyTorch and the JAX
# GPU plugin. PYTHON names another interpreter (3.11 or later).

PYTHON ?= python3
TORCH ?= $(if $(wildcard .venv/installed-cuda),cuda,cpu)
TORCH_VERSION := 2.13.0
TORCHVISION_VERSION := 0.28.0
# PyTorch's CPU builds; used for torch alone, and only if no build of that version is on disk.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu

VENV := .venv
# One stamp for each variant, so that another TORCH installs the other one.
INSTALLED := $(VENV)/installed-$(TORCH)
# Other projects that only make test-all imports.
PEERS := $(VENV)/installed-peers
# The oldest supported Triton, whose machine code make test-all examines too.
TRITON := $(VENV)/triton-3.6.0
# What builds the documentation's site.
SITE := $(VENV)/installed-site
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
PYTEST := $(BIN)/python -m pytest

# On few cores, several BLAS threads slow each other down.
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
# Without its dependencies: jax-triton needs only one small library of the plugin to compile kernels, on any machine.
INSTALL_PLUGIN := $(PIP) install -q --no-deps -c $(CONSTRAINTS) jax-cuda13-plugin
endif

# Processes of test-gpu, which compile kernels; each takes half a gigabyte of the GPU.
GPU_WORKERS ?= 8
# On a machine with everything installed: make test-gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
GPU_INSTALLED := $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(INSTALLED))
ON_GPU := PYTHONPATH=.:kernels JAX_PLATFORMS=cuda,cpu XLA_PYTHON_CLIENT_PREALLOCATE=false $(GPU_PYTHON)

.PHONY: install demo check test test-all docs test-gpu test-page bench bench-gpu kernels-report composition faults
.PHONY: fuzz clean

$(INSTALLED): pyproject.toml $(CONSTRAINTS)
	@echo "making $(VENV): about a minute, 2 GB"
	$(PYTHON) -m venv --clear $(VENV)
	$(INSTALL_TORCH)
	$(PIP) install -q -c $(CONSTRAINTS) -e '.[dev$(EXTRA)]'
	$(INSTALL_PLUGIN)
	@touch $@

$(PEERS): $(INSTALLED)
	$(PIP) install -q -c $(CONSTRAINTS) -e '.[peers]'
	$(PIP) install -q -c $(CONSTRAINTS) --no-deps --target $(VENV)/torchvision torchvision==$(TORCHVISION_VERSION)
	@touch $@

$(TRITON): $(INSTALLED)
	$(PIP) install -q --no-deps --target $@ triton==$(patsubst $(VENV)/triton-%,%,$@)
	@touch $@

$(SITE): $(INSTALLED)
	$(PIP) install -q -c $(CONSTRAINTS) -e '.[site]'
	@touch $@

install: $(INSTALLED)

demo: $(INSTALLED)
	$(BIN)/diptych compare --output-dir runs/demo

check: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(PYTEST) -n 2 -m "not slow and not notebook and not multiprocess and not thorough" --hypothesis-profile=fast

# Without a package index, the tests of the oldest Triton are skipped.
test: $(INSTALLED)
	-@$(MAKE) -s $(TRITON)
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(PYTEST) -n 2 -m "not slow"

test-all: $(PEERS) $(TRITON) docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(PYTEST) -n 2 -m "not alone" --hypothesis-profile=all --durations=40
	$(PYTEST) -m alone

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks $(NAME)

# The libraries are not installed in .venv, because transformers would use fla there.
build/peer_kernels: $(INSTALLED)
	$(PIP) install -q --no-deps --target $@ fla-core==0.6.0 liger-kernel==0.8.5 einops==0.8.2

kernels-report: build/peer_kernels
	$(BIN)/python -m benchmarks.kernels_report
	PYTHONPATH=build/peer_kernels $(BIN)/python -W ignore -m benchmarks.peer_kernels

docs: $(SITE)
	$(BIN)/sphinx-build -q -W --keep-going -c docs/generate/site . build/site
	@echo "build/site/README.html"

FUZZ_MINUTES ?= 10
fuzz: $(INSTALLED)
	$(BIN)/python -m tests.fuzz --minutes $(FUZZ_MINUTES)

faults: $(INSTALLED)
	$(BIN)/python -m tests.faults

composition: $(INSTALLED)
	$(BIN)/python -m tests.composition_report

test-page: $(INSTALLED)
	$(BIN)/python -m tests.planner.browser
	$(PYTEST) tests/planner/test_page.py tests/planner/test_page_file.py tests/planner/test_page_browser.py

test-gpu: $(GPU_INSTALLED)
	$(ON_GPU) -m pytest -n $(GPU_WORKERS) -m gpu tests

bench-gpu: $(GPU_INSTALLED)
	$(ON_GPU) -m benchmarks.compile_blocks
	$(ON_GPU) -m benchmarks.kernels
	$(ON_GPU) -m benchmarks.delta_rule_kernels
	$(ON_GPU) -m benchmarks.offload

clean:
	rm -rf $(VENV) runs build .jax_cache .pytest_cache .hypothesis .ruff_cache *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
