# Everything a person or CI does with this repository. `make` lists it.

PYTHON      ?= python3
VENV        ?= .venv
# An extra index to take torch from. Empty: the build with CUDA where there is an NVIDIA GPU, otherwise the one for the
# CPU, which uv finds, or where it cannot be reached what the default index has.
TORCH_INDEX ?=
ARGS        ?=

BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install -q --disable-pip-version-check
# Exactly what a lock lists, each file with one of its hashes.
LOCKED := $(PIP) --no-deps --require-hashes -r
# torch and what it brings by version alone, with the progress of its download. Another index has other libraries of
# CUDA: its torch pins them.
TORCH_LOCK := requirements-torch.lock
VERSION    := $$(grep '^torch==' $(TORCH_LOCK))
NOTICE     := $(BIN)/python deploy/install/torch_notice.py --index '$(TORCH_INDEX)'
LOUD       := $(BIN)/python -m pip install --disable-pip-version-check
NO_GPU     := [ "$$(uname -s)" = Linux ] && [ ! -e /dev/nvidiactl ] && ! command -v nvidia-smi >/dev/null
FOR_CPU    := UV_HTTP_RETRIES=1 $(BIN)/uv pip install --no-deps --python $(BIN)/python --torch-backend cpu $(VERSION)
TORCH      := $(if $(TORCH_INDEX),$(NOTICE) && $(LOUD) --extra-index-url $(TORCH_INDEX) $(VERSION),{ $(NO_GPU) && $(FOR_CPU); } || { $(NOTICE) && $(LOUD) -c $(TORCH_LOCK) torch; })
SERVE  := $(VENV)/.installed-serve
TEST   := $(VENV)/.installed-test
ALL    := $(VENV)/.installed-test-all

.DEFAULT_GOAL := help
.PHONY: help serve test test-all compile-kernels voice lint types docs lock wheel fonts gates clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' || { echo \
	  "Python 3.11 to 3.14 is needed, and $(PYTHON) is another: make PYTHON=/path/to/python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The hashed packages first: torch finds all that it needs but CUDA's libraries, and takes nothing unseen.
$(SERVE): pyproject.toml requirements.lock requirements-build.lock $(TORCH_LOCK) | $(BIN)/python
	$(LOCKED) requirements.lock
	$(LOCKED) requirements-build.lock
	$(TORCH)
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

# Beside a torch for the CPU, which brings no Triton, its interpreter runs the kernels at tiny sizes.
$(TEST): $(SERVE) requirements-test.lock
	$(LOCKED) requirements-test.lock
	@$(BIN)/python -c 'import triton' 2>/dev/null || [ "$$(uname -s)" != Linux ] || $(PIP) -c $(TORCH_LOCK) triton
	@touch $@

$(ALL): $(TEST) requirements-test-all.lock
	$(LOCKED) requirements-test-all.lock
	@touch $@

serve: $(SERVE)  ## Start the server, on the embedded models unless ARGS="--model ..." names others
	$(BIN)/reprise serve $(ARGS)

# One thread for each of the processes that share the cores. A file's tests share what they start, and files go in the
# order of tests/conftest.py. Bytecode is kept wherever that is switched off otherwise: hundreds of processes would
# compile the same modules.
test test-all: export OMP_NUM_THREADS = 1
# The same tests everywhere: two at a time would also contend for one GPU's memory.
test test-all: export CUDA_VISIBLE_DEVICES =
test test-all: export PYTHONDONTWRITEBYTECODE =
XDIST = -n 2 --dist loadfile --no-loadscope-reorder --durations 10
test: $(TEST)  ## Run the test suite (Python packages only, two to five minutes on 2 cores)
	$(BIN)/pytest $(XDIST) $(ARGS)

test-all: $(ALL)  ## Run what `test` leaves out; needs the Debian packages that .ci/run installs
	$(BIN)/pytest -m 'slow and not gpu' --timeout 1800 $(XDIST) $(ARGS)

compile-kernels: $(TEST)  ## Compile all kernels for every supported GPU, which takes no GPU but half an hour on 2 cores
	env -u TRITON_INTERPRET $(BIN)/python -m benchmarks.kernels.compile $(ARGS)

voice: $(SERVE)  ## Train the embedded voice anew (35 minutes of one GPU; Debian's flite and wamerican-small)
	$(BIN)/python -m training.voice.make build/voice --export build/voice/checkpoint $(ARGS)

lint: $(TEST)  ## Check style
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(TEST)  ## Check types
	$(BIN)/mypy

docs: $(SERVE)  ## Write the pages of docs/ that are made from the code
	$(BIN)/python -m deploy.documents

wheel: $(SERVE)  ## Build dist/reprise_server-*.whl, which pipx and pip install by its name
	$(BIN)/python -m pip wheel -q --no-deps --no-build-isolation -w dist .

lock: $(BIN)/python  ## Write requirements*.lock anew; ARGS=--upgrade takes the newest versions
	$(BIN)/python -m venv $(VENV)/lock
	$(VENV)/lock/bin/python -m pip install -q --disable-pip-version-check uv
	$(BIN)/python deploy/install/lock.py --uv $(VENV)/lock/bin/uv $(ARGS)

# Of the Debian packages that draw printed text for the model that sees; needs apt-get, installs nothing.
fonts: $(SERVE)  ## Fetch the fonts that the embedded chat model was trained with into build/fonts
	$(BIN)/python -m training.vision.fonts build/fonts

gates: $(SERVE)  ## Measure the embedded chat model on held-out pictures and questions (after `make fonts`)
	$(BIN)/python -m training.vision.gates $(ARGS)

clean:  ## Remove the environment and everything made
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
