# The project's commands. Each makes the virtual environment that it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2
PEERS ?= .venv-peers

.PHONY: help install demo test test-kill test-peers lint format bench-startup bench-order clean

help: ## Show this list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(VENV)/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[train,tokenizers,fast,test]'
	@touch $@

$(VENV)/.installed-test-kill: $(VENV)/.installed ## Kill a run at 50 random points, and count what it was trained on.
	KILLS=50 $(BIN)/python tests/run.py tests/trainers/kill_test.py

test-peers: $(PEERS)/.installed ## Compare fresh random streams and resumes with the real OLMo-core.
	PYTHONPATH=. JAX_PLATFORMS=cpu $(PEERS)/bin/python tests/peers/olmo_core_check.py

lint: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[lint]'
	@touch $@

# PyTorch first and by itself: any other version than this CPU build brings gigabytes along.
$(PEERS)/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet torch==2.13.0
	$(PEERS)/bin/python -m pip install --quiet --editable '.[peers]'
	@touch $@

install: $(VENV)/.installed ## Make the virtual environment.

demo: $(VENV)/.installed ## Make a corpus, train on 2 processes, kill one, resume on 1, compare.
	$(BIN)/python -m maxtext_olmo demo

test: $(VENV)/.installed ## Run all tests.
	$(BIN)/python tests/run.py -j $(JOBS)

lint: $(VENV)/.installed-lint ## Check format, style, types and the direction of imports.
	$(BIN)/ruff check --output-format=concise maxtext_olmo tests configs
	$(BIN)/pyink --check --quiet maxtext_olmo tests configs
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-lint ## Format the code.
	$(BIN)/ruff check --fix --quiet maxtext_olmo tests configs
	$(BIN)/pyink --quiet maxtext_olmo tests configs

bench-startup: $(VENV)/.installed ## Time and memory from nothing to the first batch at the size of the real mix.
	$(BIN)/python -m maxtext_olmo bench startup

bench-order: $(VENV)/.installed ## Time to the first id, ids per second and memory of each order.
	$(BIN)/python -m maxtext_olmo bench order

clean: ## Remove the virtual environment and caches.
	rm -rf $(VENV) $(PEERS) .mypy_cache .ruff_cache .hypothesis build *.egg-info
