# One way to do each chore; CI calls the same targets.
PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
READY   := $(VENV)/.ready
DEMO    := $(VENV)/.ready-demo
# Processes of the tests: one more than the cores of CI, since many wait for other processes.
WORKERS ?= 3
EXACT   := src/steelyard/penalties/*,src/steelyard/spec/*,src/steelyard/doctor/*,src/steelyard/output/*,src/steelyard/gradients/*,src/steelyard/composition/*

.DEFAULT_GOAL := help
.PHONY: help test browser test-gpu lint format demo pictures bench stress docs dist check-constraints hashes clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# pip checks the hash of every package but torch, which may be a local build for the CPU, and what
# torch alone requires. Nothing is built from packages fetched without a hash: hatchling is among them.
# tinker-cookbook, for the server's tests, asks for an older transformers than ours, and works with
# ours: it comes without its dependencies, and the extra `dev` has those that the tests need. So does
# reasoning-gym, since some of its dependencies have no wheels.
PIP := $(BIN)/python -m pip install --disable-pip-version-check
$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Steelyard needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(READY): pyproject.toml constraints.txt hashes.txt | $(BIN)/python
	@echo 'Installing what the tests need into $(VENV): 240 packages, 4 GB, about five minutes.'
	$(PIP) --quiet --require-hashes --only-binary=:all: --no-deps -r hashes.txt
	$(PIP) --quiet --no-build-isolation --no-warn-conflicts -c constraints.txt -e '.[dev]'
	touch $@ $(DEMO)

$(DEMO): pyproject.toml constraints.txt hashes-demo.txt | $(BIN)/python
	@echo 'Installing what the demo needs into $(VENV): 70 packages and torch, 1.3 GB without CUDA.'
	$(PIP) --require-hashes --only-binary=:all: --no-deps -r hashes-demo.txt
	$(PIP) -c constraints.txt torch
	$(PIP) --quiet --no-build-isolation -c constraints.txt -e '.[demo]'
	touch $@

test: lint browser ## ruff, mypy, every test, doctest and README block, coverage
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder --max-worker-restart=9 --cov --cov-report=
	$(BIN)/python -m coverage report
	@$(BIN)/python -m coverage report --include='$(EXACT)' --fail-under=100 >/dev/null || { \
	  echo 'Coverage of penalties, spec, doctor, output, gradients and composition must be 100 %:'; \
	  $(BIN)/python -m coverage report --include='$(EXACT)'; exit 1; }

browser: ## install the browser of the tests, as root on Debian
	@tools/browser.sh

# Not the environment of this Makefile, whose torch has no CUDA: PYTHON is one that has.
ON_GPU := tests/composition/test_traced.py tests/composition/test_composite_fusing.py \
  tests/execution/test_threads.py \
  tests/composition/test_distributed_inputs.py::test_a_group_of_one_on_any_device \
  tests/engine/test_projection.py::test_a_projection_on_any_device \
  tests/engine/test_on_gpu.py tests/engine/test_fused_layers.py tests/engine/test_token_logprobs.py \
  tests/integrations/huggingface/test_logit_free_loss.py::test_the_same_training_without_logits
test-gpu: ## kernels, penalties, composites, projections and the engine on CUDA; PYTHON= a python with CUDA
	$(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "test-gpu needs a GPU and a torch with CUDA: make test-gpu PYTHON=...")'
	PYTHONPATH=src$(if $(PYTHONPATH),:$(PYTHONPATH)) JAX_PLATFORMS=cpu $(PYTHON) -m pytest tests/penalties $(ON_GPU)

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/mypy --no-error-summary

format: $(READY) ## apply ruff's fixes and formatting
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .

demo: $(DEMO) ## train a small model with and without a term, and write a report
	@$(BIN)/steelyard demo

pictures: $(READY) ## train the demo, and take the pictures of README and docs in a browser
	@$(BIN)/python tools/pictures.py

bench: $(READY) ## measure the speed, as ratios within one run
	@$(BIN)/python -m benchmarks

stress: $(READY) ## long tests: a thousand failures in a row, killed writers, the server under load, random losses
	@$(BIN)/python -m benchmarks.stress
	@$(BIN)/python -m benchmarks.stress_checkpoints
	@$(BIN)/python -m benchmarks.stress_server
	@$(BIN)/python -m benchmarks.stress_losses

docs: $(READY) ## build the documentation site into site/; a broken link fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(READY) ## build sdist and wheel, and test the wheel in a new environment
	@$(BIN)/python tools/release.py

check-constraints: $(READY) ## check that constraints.txt resolves from the package index alone
	@$(BIN)/python tools/constraints.py

# Needs no environment of its own making: it writes what that environment is made from.
hashes: ## write hashes.txt from constraints.txt; PYTHON= a python with pip 26.3 and packaging
	@$(PYTHON) tools/constraints.py --hashes

clean: ## remove the environment and every cache
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage dist
