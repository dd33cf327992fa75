# `make quickstart` and `make test` need only python3 (3.11 to 3.13), make and pip: each target first makes $(VENV) and
# installs what it needs, once; a stamp file per set of packages remembers that.
PYTHON ?= python3
VENV ?= .venv
# Whether to install torch for the comparisons with it: 1 yes, 0 no, auto only where pip would take a CPU build.
PEERS ?= auto
# Anything for pytest, such as PYTEST_ARGS="-k storage -x".
PYTEST_ARGS ?=
# Such as QUICKSTART_ARGS=--short.
QUICKSTART_ARGS ?=

BIN := $(VENV)/bin
SETUP := requirements.txt pyproject.toml

.PHONY: help quickstart test test-quick test-long lint format bench clean

help:
	@echo "make quickstart   train a small GPT over 8 simulated devices on this machine, and sample from it"
	@echo "make test         every behaviour in a short form"
	@echo "make test-quick   the tests that take seconds"
	@echo "make test-long    the full counts; writes a dated log into docs/measurements/"
	@echo "make lint         format, lint and types"
	@echo "make format       let the formatter rewrite"
	@echo "make bench        speed, beside Hugging Face GPT-J on torch"

$(BIN)/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 11) <= v < (3, 14) else "error: $(PYTHON) is Python %d.%d; mesh-transformer runs on 3.11 to 3.13: make PYTHON=/path/to/python3.12" % v[:2])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed-core: $(SETUP) | $(BIN)/python
	$(BIN)/python -m pip install -e .
	@touch $@

$(VENV)/.installed-plot: $(VENV)/.installed-core
	$(BIN)/python -m pip install -e '.[plot]'
	@touch $@

$(VENV)/.installed-evaluation: $(VENV)/.installed-core
	$(BIN)/python -m pip install -e '.[evaluation]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed-core
	$(BIN)/python -m pip install -e '.[dev]'
	@touch $@

$(VENV)/.installed-peers-%: $(VENV)/.installed-core scripts/install_peers.py
	$(BIN)/python scripts/install_peers.py --install $*
	@touch $@

# libtpu, so that plans are compiled: the release that the installed jax names, where there is one for this machine.
$(VENV)/.installed-compiler: $(VENV)/.installed-core scripts/install_compiler.py
	$(BIN)/python scripts/install_compiler.py
	@touch $@

quickstart: $(VENV)/.installed-plot
	$(BIN)/python scripts/quickstart.py $(QUICKSTART_ARGS)

test: $(VENV)/.installed-dev $(VENV)/.installed-peers-$(PEERS) $(VENV)/.installed-compiler
	$(BIN)/python -m pytest --durations=15 $(PYTEST_ARGS)

test-quick: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m "not long and not slow" $(PYTEST_ARGS)

test-long: $(VENV)/.installed-dev $(VENV)/.installed-peers-$(PEERS) $(VENV)/.installed-compiler
	$(BIN)/python scripts/run_long_tests.py $(PYTEST_ARGS)

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/.installed-plot $(VENV)/.installed-evaluation $(VENV)/.installed-peers-1
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache
