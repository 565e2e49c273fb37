# make help lists the targets. Settings: PYTHON (interpreter of the environment), TORCH (what to install where torch is
# missing), OTHER (a second Python), TRITON (version whose compiler is tried), VENV_ARGS (e.g. --system-site-packages),
# PY (run the tools with another interpreter, which sets up nothing).
SHELL := bash
.DEFAULT_GOAL := help

TORCH ?= torch==2.13.0
TRITON ?= 3.9.0
OTHER ?= python3.13
PY ?= .venv/bin/python

ifeq ($(PY),.venv/bin/python)
SETUP := .venv/.installed
endif

PYTEST := $(PY) -m pytest
# What is tested on a CPU sees no GPU: two ranks of a test would want two. Memory as in `commands.launch.hide_gpus`.
ON_CPU := CUDA_VISIBLE_DEVICES= MALLOC_MMAP_THRESHOLD_=33554432 MALLOC_TRIM_THRESHOLD_=1073741824
BIN := $(filter-out ./,$(dir $(PY)))
SCRIPTS := .ci/run $(wildcard scripts/*.sh scripts/slurm/*)

.PHONY: help quickstart test test-slow test-torch other-python test-other-python triton test-triton test-interpreted test-gpu test-multigpu wheel test-wheel lint docs format clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##|^\.venv/\.installed:.*##' $(MAKEFILE_LIST) | sed 's/\.venv\/\.installed/.venv\/.installed/' | \
	  awk -F ':.*## ' '{printf "  %-18s %s\n", $$1, $$2}'

.venv/.installed: pyproject.toml scripts/setup_venv.sh  ## The environment (made by the targets that need it)
	@PYTHON='$(PYTHON)' TORCH='$(TORCH)' VENV_ARGS='$(VENV_ARGS)' bash scripts/setup_venv.sh
	@touch $@

quickstart: $(SETUP)  ## Train a tiny GPT in FP8 on two CPU ranks, from raw text to a loss curve
	bash scripts/quickstart.sh

test: $(SETUP)  ## The CPU tests
	$(ON_CPU) $(PYTEST) -n 2 --dist loadfile

test-slow: $(SETUP)  ## The CPU tests that take minutes
	$(ON_CPU) $(PYTEST) -n 2 --dist worksteal -m "slow and not gpu and not multigpu" --timeout 900 || [ $$? -eq 5 ]  # 5: there are none

test-torch:  ## The CPU tests on any torch, in build/venv-torch (TORCH=torch==2.15.0)
	@VENV=build/venv-torch ANY_TORCH=1 PYTHON='$(PYTHON)' TORCH='$(TORCH)' bash scripts/setup_venv.sh
	$(MAKE) test PY=build/venv-torch/bin/python

build/venv-%/.installed: pyproject.toml scripts/setup_venv.sh
	@VENV=$(@D) PYTHON='$*' TORCH='$(TORCH)' bash scripts/setup_venv.sh
	@touch $@

other-python: build/venv-$(OTHER)/.installed

test-other-python: build/venv-$(OTHER)/.installed  ## megatron-core's wing, every layout and the quickstart on another Python, with its newest megatron-core (OTHER=python3.13)
	$(ON_CPU) $(<D)/bin/python -m pytest -n 2 --dist loadfile tests/mcore tests/parallel
	PY=$(<D)/bin/python bash scripts/quickstart.sh

build/triton-$(TRITON)/.installed: $(SETUP)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) triton==$(TRITON)
	@touch $@

triton: build/triton-$(TRITON)/.installed

test-triton: build/triton-$(TRITON)/.installed  ## All Triton kernels without a GPU: their numbers, and compiled for every GPU with FP8 (TRITON=3.6.0)
	PYTHONPATH=$(<D) TRITON_INTERPRET=1 $(ON_CPU) $(PYTEST) -n 2 -m "not multigpu and not slow" tests/kernels/test_triton_numbers.py tests/kernels/test_amax_history_triton.py
	PYTHONPATH=$(<D) TRITON_CACHE_DIR=build/triton-cache $(ON_CPU) $(PYTEST) -n 2 tests/kernels/test_triton_compiles.py

TESTS ?= tests/kernels/test_triton.py
test-interpreted: build/triton-$(TRITON)/.installed  ## Tests of Triton kernels for a GPU on a CPU, by the interpreter (TESTS=FILE)
	PYTHONPATH=$(<D) TRITON_INTERPRET=1 $(ON_CPU) $(PYTEST) -n 2 -m "gpu and not multigpu" $(TESTS)

test-gpu: $(SETUP)  ## The tests of one GPU (PY=python3 takes your own environment)
	$(PYTEST) -m "gpu and not multigpu"

test-multigpu: $(SETUP)  ## The tests of several GPUs
	$(PYTEST) -m multigpu --timeout 900

wheel: $(SETUP)  ## The wheel and the source distribution, into dist/
	rm -rf dist
	$(PY) -m build --outdir dist .

test-wheel: wheel  ## The wheel, tried with the packages that it asks for, and beside torch alone
	PY='$(PY)' bash scripts/try_wheel.sh

lint: $(SETUP)  ## ruff, mypy, import layers, shellcheck, hadolint
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(BIN)lint-imports
	$(BIN)shellcheck $(SCRIPTS)
	$(BIN)hadolint Dockerfile

docs: $(SETUP)  ## The documentation site, built strictly into runs/site
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --quiet --strict

format: $(SETUP)  ## Format the Python sources, fix what ruff can
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

clean:  ## Remove caches and builds; runs/ and .venv/ stay
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
