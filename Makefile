# Everything a person or CI does with this repository. `make` lists it.

PYTHON      ?= python3
VENV        ?= .venv
# An extra index to take torch from, e.g. one with CPU builds; empty: the default one.
TORCH_INDEX ?=
ARGS        ?=
# Beside a torch for the CPU, which brings none, its interpreter runs the kernels at tiny sizes.
TRITON      := 3.7.1

BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt \
          $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
SERVE  := $(VENV)/.installed-serve
TEST   := $(VENV)/.installed-test
ALL    := $(VENV)/.installed-test-all

.DEFAULT_GOAL := help
.PHONY: help serve test test-all lint types docs clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(SERVE): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(TEST): pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[test]'
	@$(BIN)/python -c 'import triton' 2>/dev/null || [ "$$(uname -s)" != Linux ] || $(PIP) triton==$(TRITON)
	@touch $@ $(SERVE)

$(ALL): $(TEST)
	$(PIP) -e '.[test,test-all]'
	@touch $@

serve: $(SERVE)  ## Start the server, on the embedded models unless ARGS="--model ..." names others
	$(BIN)/reprise serve $(ARGS)

# One thread for each of the processes that share the cores; a file's tests share what they start.
test: export OMP_NUM_THREADS = 1
test: $(TEST)  ## Run the test suite (Python packages only, under 10 minutes on 2 cores)
	$(BIN)/pytest -n 2 --dist loadfile $(ARGS)

test-all: $(ALL)  ## Run what `test` leaves out; needs the Debian packages that .ci/run installs
	$(BIN)/pytest -m 'slow and not gpu' --timeout 1800 $(ARGS)

lint: $(TEST)  ## Check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TEST)  ## Check types
	$(BIN)/mypy

docs: $(SERVE)  ## Write the pages of docs/ that are made from the code
	$(BIN)/python -m service.documents

clean:  ## Remove the environment and everything made
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
