# The project's commands. Each makes the virtual environment that it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2

.PHONY: help install demo test lint format bench-startup bench-lmeval clean

help: ## Show this list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(VENV)/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[train,tokenizers,fast,eval,test]'
	@touch $@

$(VENV)/.installed-lint: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[lint]'
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

bench-lmeval: $(VENV)/.installed ## Padding, shapes and speed of evaluation: unsorted, sorted per host, sorted globally.
	$(BIN)/python -m maxtext_olmo bench lmeval

clean: ## Remove the virtual environment and caches.
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis build *.egg-info
