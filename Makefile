# One way to do each chore; CI calls the same targets.
PYTHON  ?= python3
VENV    := .venv
BIN     := $(VENV)/bin
READY   := $(VENV)/.ready
WORKERS ?= 2
EXACT   := src/steelyard/penalties/*,src/steelyard/spec/*,src/steelyard/output/*,src/steelyard/gradients/*,src/steelyard/composition/*

.DEFAULT_GOAL := help
.PHONY: help test test-gpu lint format demo bench stress docs dist clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# tinker-cookbook, for the server's tests, asks for an older transformers than ours, and works with
# ours: it comes without its dependencies, and the extra `dev` has those that the tests need.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Steelyard needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps tinker-cookbook
	touch $@

test: lint ## ruff, mypy, every test, doctest and README block, coverage
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses=$(WORKERS) --dist=loadfile --cov --cov-report=
	$(BIN)/python -m coverage report
	@$(BIN)/python -m coverage report --include='$(EXACT)' --fail-under=100 >/dev/null || { \
	  echo 'Coverage of penalties, spec, output, gradients and composition must be 100 %:'; \
	  $(BIN)/python -m coverage report --include='$(EXACT)'; exit 1; }

# Not the environment of this Makefile, whose torch has no CUDA: PYTHON is one that has.
test-gpu: ## the kernels and every penalty on CUDA; PYTHON= a python whose torch has CUDA
	$(PYTHON) -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "test-gpu needs a GPU and a torch with CUDA: make test-gpu PYTHON=...")'
	PYTHONPATH=src JAX_PLATFORMS=cpu $(PYTHON) -m pytest tests/penalties

lint: $(READY) ## ruff and mypy
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check .
	$(BIN)/mypy --no-error-summary

format: $(READY) ## apply ruff's fixes and formatting
	$(BIN)/ruff check --quiet --fix .
	$(BIN)/ruff format --quiet .

demo: $(READY) ## fine-tune a small model with five terms, and write a report
	@$(BIN)/steelyard demo

bench: $(READY) ## measure the speed, as ratios within one run
	@$(BIN)/python -m benchmarks

stress: $(READY) ## long tests: a thousand failures in a row, killed writers, the server under load
	@$(BIN)/python -m benchmarks.stress
	@$(BIN)/python -m benchmarks.stress_checkpoints
	@$(BIN)/python -m benchmarks.stress_server

docs: $(READY) ## build the documentation site into site/; a broken link fails
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

dist: $(READY) ## build sdist and wheel, and test the wheel in a new environment
	@$(BIN)/python tools/release.py

clean: ## remove the environment and every cache
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage dist
