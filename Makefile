# The project's commands. Each makes the virtual environment that it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2

.PHONY: help install demo test lint format bench bench-peers bench-startup clean

help: ## Show this list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(VENV)/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[train,tokenizers,fast,test]'
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

bench: $(VENV)/.installed ## Throughput beside the copy limit and other loaders, start-up, growth, slow disks: 10 minutes.
	$(BIN)/python -m maxtext_olmo bench throughput --output bench-run

bench-peers: .venv-peers/.installed-bench .venv-maxtext/.installed-bench ## Install the loaders that `make bench` compares with.

# PyTorch first and by itself: any other version than this CPU build brings gigabytes along.
.venv-peers/.installed-bench:
	test -x .venv-peers/bin/python || $(PYTHON) -m venv .venv-peers
	.venv-peers/bin/python -m pip install --quiet torch==2.13.0
	.venv-peers/bin/python -m pip install --quiet torch==2.13.0 ai2-olmo-core==3.0.0 mosaicml-streaming litdata
	@touch $@

# MaxText needs Python 3.12; its wheel names no requirements, and pip takes minutes over these, uv seconds.
PYTHON312 ?= python3.12
.venv-maxtext/.installed-bench:
	test -x .venv-maxtext/bin/python || $(PYTHON312) -m venv .venv-maxtext
	.venv-maxtext/bin/python -m pip install --quiet uv
	.venv-maxtext/bin/uv pip install --quiet --python .venv-maxtext/bin/python 'maxtext==0.2.5' 'jax>=0.11.1' \
	  'jaxlib>=0.11.1' 'flax>=0.12.9' 'grain[parquet]>=0.2.18' 'orbax-checkpoint>=0.12.4' 'numpy>=2.1.3' optax \
	  'qwix>=0.1.8' aqtp 'tokamax>=0.0.14' omegaconf pydantic absl-py array-record chex ml-collections \
	  pathwaysutils 'drjax>=0.2.1' 'jaxtyping>=0.3.11' tensorboardx transformers datasets sentencepiece tiktoken \
	  huggingface_hub psutil pillow jsonlines safetensors etils jinja2 sympy
	@touch $@

clean: ## Remove the virtual environment and caches.
	rm -rf $(VENV) .mypy_cache .ruff_cache .hypothesis build *.egg-info
