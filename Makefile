# Everything runs in one virtual environment. Stamp files record what is installed in it. A stamp is written only after
# pip succeeded, and is out of date if pyproject.toml or constraints.txt is newer.
#
#   make train PYTHON=python3.12 VENV=.venv312    use another Python, in a separate environment

PYTHON ?= python3
VENV ?= .venv
CONFIG ?= configs/tiny.yaml
PYTEST_ARGS ?=
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c

# Images for containers set it. Each process then compiles all that it imports, and pytest rewrites every assertion.
unexport PYTHONDONTWRITEBYTECODE

PY = $(VENV)/bin/python
PIP = $(PY) -m pip --disable-pip-version-check --no-input
# ZAYA_INSTALL='uv pip install --quiet --python $(PY)' is faster, but reads no pip.conf.
ZAYA_INSTALL ?= $(PIP) install --progress-bar off
# Of what pip prints, the larger packages as they arrive, and how many it unpacks.
PROGRESS = awk '/ing .* \([0-9.]+ MB\)/ { print "  " $$(NF - 2) " " $$(NF - 1) " " $$NF; fflush() } \
  /^Installing collected/ { print "  unpacking " NF - 3 " packages"; fflush() }'
SPEC := pyproject.toml constraints.txt
# The pip extra for this machine's GPU, detected from the drivers' device files; empty without a GPU. GPU= takes the CPU.
GPU := $(if $(wildcard /dev/kfd),rocm,$(if $(wildcard /dev/nvidia*),cuda))

# Rebuild an environment that was moved, or whose Python is gone.
ifneq ($(wildcard $(VENV)/.stamp-venv),)
$(shell test "$$(cat $(VENV)/.stamp-venv)" = "$(abspath $(VENV))" && $(PY) -c '' 2>/dev/null || rm -f $(VENV)/.stamp-*)
endif

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help train test test-times quick lint docs pages parity compilers bench gpu-report soak wheel clean

help:
	@echo "make train      train the tiny model on this machine, on its GPU if it has one (CONFIG=configs/... for another model, GPU= for the CPU)"
	@echo "make test       run the tests"
	@echo "make quick      check what your change can break, in about a minute (BASE=COMMIT: all changes since then)"
	@echo "make test-times run the tests, and print their CPU-seconds by folder, and the slowest"
	@echo "make lint       run ruff, basedpyright and the import contracts"
	@echo "make docs       build the documentation site in build/docs"
	@echo "make pages      rerun the commands whose output the README and docs/ show, and rewrite it (PAGES=... for some)"
	@echo "make parity     compare with the PyTorch model of transformers, and through lm-eval (installs both)"
	@echo "make compilers  compile for AMD and NVIDIA GPUs with XLA's compilers (installs them; no GPU is needed)"
	@echo "make bench      time a training step against transformers, and data loading against Grain (installs both)"
	@echo "make gpu-report test and time training on this machine's GPUs (CONTAINER=docker: in a container)"
	@echo "make soak       run the slow tests, which take minutes each"
	@echo "make wheel      build dist/zaya_jax-VERSION-py3-none-any.whl, with the configurations"
	@echo "make clean      remove environments and caches, but keep runs/"
	@echo
	@echo "example: make train CONFIG=configs/recipe_tiny.yaml"

train: $(VENV)/.stamp-$(or $(GPU),run)
	$(PY) -m zaya_jax.main --config $(CONFIG)

test: $(VENV)/.stamp-test
	$(if $(PYTEST_ARGS),,@$(PY) -m tests.tools.times)
	$(PY) -m pytest -n logical --maxprocesses 4 --dist loadfile $(PYTEST_ARGS)

# TIMES=FILE also writes them; tests/tools/times.json is what `make quick` plans with.
test-times: $(VENV)/.stamp-test
	$(PY) -m pytest -n logical --maxprocesses 4 --dist loadfile -p tests.tools.times \
	  $(if $(TIMES),--times-json $(TIMES)) $(PYTEST_ARGS)

quick: $(VENV)/.stamp-dev
	@$(PY) -m tests.tools.quick $(if $(BASE),--base $(BASE))

lint: $(VENV)/.stamp-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m basedpyright --pythonpath $(PY)
	$(VENV)/bin/lint-imports --no-logo

# Nothing but the CPU is used, and JAX should not look for GPUs when the modules are imported.
docs: $(VENV)/.stamp-docs
	JAX_PLATFORMS=cpu $(PY) -m sphinx --fail-on-warning --keep-going --nitpicky --quiet --conf-dir docs . build/docs
	@echo "Open build/docs/index.html"

# Also needs Chromium for the README (Debian: chromium). PAGES='README.md docs/data.md' for these only.
pages: $(VENV)/.stamp-test
	$(PY) -m tests.tools.pages $(PAGES)

parity: $(VENV)/.stamp-parity
	$(PY) -m pytest -m parity $(or $(PYTEST_ARGS),tests/parity tests/benchmarks)

# In an environment of its own: with the plugins installed, every jax program looks for their GPUs first.
compilers: $(VENV)-compilers/.stamp
	$(VENV)-compilers/bin/python -m pytest -n logical --maxprocesses 4 --dist loadfile \
	  -m "compilers and not soak" tests/lab/compilers $(PYTEST_ARGS)

bench: $(VENV)/.stamp-bench
	$(PY) -m benchmarks step
	$(PY) -m benchmarks data

# REPORT='--only step' passes flags on. With CONTAINER=docker or podman it runs in the ROCm image, and installs nothing here.
ifdef CONTAINER
gpu-report:
	$(CONTAINER) build -f containers/rocm.Dockerfile -t zaya-jax:rocm .
	$(CONTAINER) run --rm --device /dev/kfd --device /dev/dri --group-add video --security-opt seccomp=unconfined \
	  --ipc host --ulimit memlock=-1 -v "$(CURDIR)/benchmarks:/zaya_jax/benchmarks" zaya-jax:rocm \
	  python -m benchmarks gpu_report --commit "$$(git rev-parse HEAD)$$(git diff --quiet HEAD -- . ':!benchmarks/gpu' || echo -dirty)" $(REPORT)
else
gpu-report: $(VENV)/.stamp-$(or $(GPU),run)
	$(if $(GPU),,@echo "No GPU found (no /dev/kfd, no /dev/nvidia*): measuring the CPU, at a small size.")
	$(PY) -m benchmarks gpu_report $(REPORT)
endif

# Also needs Chromium and promtool (Debian: chromium, prometheus).
soak: $(VENV)/.stamp-soak
	$(PY) -m pytest -m soak $(PYTEST_ARGS)

# From nothing, since setuptools would also pack files that an earlier build has left.
wheel: $(VENV)/.stamp-venv
	rm -rf build dist
	$(PIP) wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf .venv .venv312 .venv-compilers .venv312-compilers build dist .hypothesis .import_linter_cache .pytest_cache .ruff_cache *.egg-info
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

# --- the environment -------------------------------------------------------------------------------------------

$(VENV)/.stamp-venv:
	@$(PYTHON) --version >/dev/null 2>&1 || { \
	  echo "'$(PYTHON)' does not run. Install Python 3.11 or newer, or name another one: make PYTHON=/path/to/python"; \
	  exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "zaya_jax needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1)." \
	       "Name a newer one: make PYTHON=python3.12"; \
	  exit 1; }
	@test ! -e $(VENV) || test -f $(VENV)/pyvenv.cfg || { \
	  echo "'$(VENV)' exists, but is not a Python environment. Remove it, or choose another: make VENV=.venv2"; \
	  exit 1; }
	@echo "Setting up $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv --clear $(VENV)
	@echo "$(abspath $(VENV))" > $@

# Each install includes the smaller ones, so it writes their stamps, too.
$(VENV)/.stamp-run: $(VENV)/.stamp-venv $(SPEC)
	@echo "Installing the packages for training (a few minutes the first time)"
	@$(ZAYA_INSTALL) -e . -c constraints.txt | $(PROGRESS)
	@touch $@

$(VENV)/.stamp-test: $(VENV)/.stamp-venv $(SPEC)
	@echo "Installing the packages for the tests (a few minutes the first time)"
	@$(ZAYA_INSTALL) -e '.[test,notebooks]' -c constraints.txt | $(PROGRESS)
	@touch $(VENV)/.stamp-run $@

$(VENV)/.stamp-soak: $(VENV)/.stamp-venv $(SPEC)
	@echo "Installing the packages for the slow tests (a few minutes the first time)"
	@$(ZAYA_INSTALL) -e '.[test,notebooks,wandb]' -c constraints.txt | $(PROGRESS)
	@touch $(VENV)/.stamp-run $(VENV)/.stamp-test $@

$(VENV)/.stamp-dev: $(VENV)/.stamp-venv $(SPEC)
	@echo "Installing the packages for development (a few minutes the first time)"
	@$(ZAYA_INSTALL) -e '.[dev]' -c constraints.txt | $(PROGRESS)
	@touch $(VENV)/.stamp-run $(VENV)/.stamp-test $@

$(VENV)/.stamp-docs: $(VENV)/.stamp-venv $(SPEC)
	@echo "Installing Sphinx for the documentation (a minute the first time)"
	@$(ZAYA_INSTALL) -e '.[docs]' -c constraints.txt | $(PROGRESS)
	@touch $(VENV)/.stamp-run $@

$(VENV)/.stamp-parity: $(VENV)/.stamp-venv $(SPEC)
	@echo "Installing torch, transformers and lm-eval for the parity tests (a few minutes the first time)"
	@$(ZAYA_INSTALL) -e '.[test,notebooks,parity,evaluation]' -c constraints.txt | $(PROGRESS)
	@touch $(VENV)/.stamp-run $(VENV)/.stamp-test $@

$(VENV)-compilers/.stamp: PY = $(VENV)-compilers/bin/python
$(VENV)-compilers/.stamp: $(SPEC)
	@echo "Installing XLA's compilers for GPUs in $(VENV)-compilers (a few minutes the first time)"
	@test ! -e $(VENV)-compilers || test -f $(VENV)-compilers/pyvenv.cfg || { \
	  echo "'$(VENV)-compilers' exists, but is not a Python environment. Remove it, or choose another: make VENV=.venv2"; \
	  exit 1; }
	@$(PYTHON) -m venv --clear $(VENV)-compilers
	@$(ZAYA_INSTALL) -e '.[test,compile-cuda,compile-rocm,ports]' -c constraints.txt | $(PROGRESS)
	@touch $@

$(VENV)/.stamp-bench: $(VENV)/.stamp-parity
	@echo "Installing the projects that the benchmarks compare with"
	@$(ZAYA_INSTALL) -e '.[test,notebooks,parity,evaluation,bench]' -c constraints.txt | $(PROGRESS)
	@touch $@

$(VENV)/.stamp-rocm $(VENV)/.stamp-cuda: $(VENV)/.stamp-venv $(SPEC)
	@echo "Installing JAX for this machine's GPU, [$(patsubst $(VENV)/.stamp-%,%,$@)] (a few minutes the first time)"
	@$(ZAYA_INSTALL) -e '.[$(patsubst $(VENV)/.stamp-%,%,$@)]' -c constraints.txt | $(PROGRESS)
	@touch $(VENV)/.stamp-run $@
