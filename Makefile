# The project's commands. Each makes the virtual environment that it needs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
JOBS ?= 2

# The real OLMo-core and other loaders, to compare with.
PEERS ?= .venv-peers

# MaxText needs Python 3.12; pyenv's own, where no python3.12 works as it is.
PYTHON312 ?= $(shell for python in python3.12 $${PYENV_ROOT:-$$HOME/.pyenv}/versions/3.12*/bin/python3.12; do \
  "$$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null && echo "$$python" && break; done)
MAXTEXT_VENV ?= .venv-maxtext
MAXTEXT_BIN := $(MAXTEXT_VENV)/bin
# Other releases of MaxText, with which runs are killed and resumed; the newest is in MAXTEXT_VENV.
MAXTEXT_OTHER ?= 0.2.4
MAXTEXT_OTHER_VENVS := $(MAXTEXT_OTHER:%=$(MAXTEXT_VENV)-%)

# Bokeh and a driver of Chromium, on top of the packages in VENV.
BROWSER_VENV ?= .venv-browser

# Object stores to run on loopback, and readers to compare with, on top of the packages in VENV.
CLOUD_VENV ?= .venv-cloud

# dolma's tool, which makes corpora from text, to compare with.
DOLMA_VENV ?= .venv-dolma

# Dask and, if there is a wheel, Ray, on top of the packages in VENV.
FLEET_VENV ?= .venv-fleet

# Sphinx, Jupyter and the tools that build and check a release, on top of the packages in VENV.
DOCS_VENV ?= .venv-docs

# The oldest and the newest releases that setup.cfg allows; a pair of environments for each version of PYTHON.
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
LOWEST_VENV ?= .venv-lowest-$(PYTHON_VERSION)
NEWEST_VENV ?= .venv-newest-$(PYTHON_VERSION)

.PHONY: help install environments demo recipe test test-fast test-kill test-hostile test-peers test-maxtext test-browser test-cloud test-cloud-long test-cluster test-fleet test-lowest test-newest docs dist lint format bench bench-peers bench-startup bench-order \
  bench-packing bench-lmeval bench-calls bench-inspect bench-maxtext bench-cloud bench-fleet bench-scale pictures screenshots clean

help: ## Show this list.
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# In two stages: the demo needs a fifth of what the tests need. pip shows its progress.
$(VENV)/.installed-train: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(VENV)
	@echo "Installing JAX, Grain, Orbax and optax into $(VENV): a download of about 180 MB (770 MB on disk), unless pip has them cached."
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[train]'
	@# So that each test file runs by itself too: python tests/corpus/index_builder_test.py
	@echo '$(CURDIR)' > $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/maxtext_olmo_tests.pth
	@touch $@

$(VENV)/.installed: $(VENV)/.installed-train
	@echo "Installing what the tests need (PyTorch for lm-eval is most of it): up to 1.5 GB."
	$(BIN)/python -m pip install --quiet --editable '.[train,tokenizers,chat,zstd,parquet,fast,cloud,eval,test]'
	@touch $@

$(VENV)/.installed-lint: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --editable '.[lint]'
	@touch $@

# PyTorch first and by itself: any other version than this CPU build brings gigabytes along.
$(PEERS)/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet torch==2.13.0
	$(PEERS)/bin/python -m pip install --quiet --editable '.[peers]'
	@touch $@

$(PEERS)/.installed-bench: $(PEERS)/.installed
	$(PEERS)/bin/python -m pip install --quiet torch==2.13.0 mosaicml-streaming litdata
	@touch $@

$(MAXTEXT_VENV)/.installed: setup.cfg pyproject.toml
	$(PYTHON312) -m venv $(MAXTEXT_VENV)
	$(MAXTEXT_BIN)/python -m pip install --quiet uv
	$(MAXTEXT_BIN)/uv pip install --quiet --python $(MAXTEXT_BIN)/python --editable '.[maxtext,cloud,test]'
	@touch $@

# MaxText alone, by version; after it come the packages of MAXTEXT_VENV with all that their .pth files add.
$(MAXTEXT_VENV)-%/.installed: $(MAXTEXT_VENV)/.installed
	$(MAXTEXT_BIN)/python -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --no-deps maxtext==$*
	@$(MAXTEXT_BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/maxtext_olmo.pth
	@touch $@

install: $(VENV)/.installed ## Make the virtual environment.

environments: $(addsuffix /.installed,$(LOWEST_VENV) $(PEERS) $(BROWSER_VENV) $(CLOUD_VENV) $(FLEET_VENV) $(DOCS_VENV) $(if $(PYTHON312),$(MAXTEXT_VENV))) $(VENV)/.installed-lint ## Make all virtual environments; with -j 2, two at a time.

ifneq ($(filter environments,$(MAKECMDGOALS)),)
# One after another: each builds the package in this directory.
$(PEERS)/.installed: | $(VENV)/.installed-lint
$(MAXTEXT_VENV)/.installed: | $(PEERS)/.installed
endif

demo: $(VENV)/.installed-train ## Make a corpus, train on 2 processes, kill one, resume on 1, compare.
	$(BIN)/python -m maxtext_olmo demo

recipe: $(VENV)/.installed ## Train a miniature of OLMo 3 through all stages, kill it in each, resume, compare.
	PYTHONPATH=. $(BIN)/python -m tests.recipe

test: $(VENV)/.installed ## Run all tests.
	JAX_COMPILATION_CACHE_DIR=$(CURDIR)/$(VENV)/programs $(BIN)/python tests/run.py --share -j $(JOBS) --leave-out tests/cloud --leave-out tests/cluster --leave-out tests/fleet

# Compiled programs are kept: compiling them again takes half of the time.
test-fast: $(VENV)/.installed ## Run the tests that start no process, in a few shared interpreters.
	JAX_COMPILATION_CACHE_DIR=$(CURDIR)/$(VENV)/programs $(BIN)/python tests/run.py --fast -j $(JOBS)

test-kill: $(VENV)/.installed ## Kill a run at 50 random points, and count what it was trained on.
	KILLS=50 $(BIN)/python tests/run.py tests/trainers/tiny/kill_test.py

test-hostile: $(VENV)/.installed ## Try bad files, values, faults, full disks, kills and threads; end with a table.
	$(BIN)/python -m tests.hostile -j $(JOBS)

test-peers: $(PEERS)/.installed ## Compare fresh random rows of all kinds, resumes and averages with the real OLMo-core; end with a table.
	PYTHONPATH=. JAX_PLATFORMS=cpu $(PEERS)/bin/python -m tests.peers

ifeq ($(PYTHON312),)
test-maxtext:
	@echo "test-maxtext: skipped, because MaxText needs Python 3.12 and none was found; set PYTHON312=/path/to/python3.12."
else
# Tests of the data path that also run with MaxText's versions of its dependencies.
MAXTEXT_LOADER ?= tests/input_pipeline tests/order tests/rows/steps_test.py tests/devices/expand_test.py \
  $(addprefix tests/loader/,laws_test.py olmo_grain_test.py resume_test.py checkpoint_item_test.py)
# Compiled bytecode and compiled programs are kept: without them most of the time goes into making them again.
test-maxtext: $(MAXTEXT_VENV)/.installed $(MAXTEXT_OTHER_VENVS:%=%/.installed) ## Run the tests inside the real MaxText trainer, on Python 3.12.
	env -u PYTHONDONTWRITEBYTECODE MAXTEXT_TEST_CACHE=$(CURDIR)/$(MAXTEXT_VENV)/programs \
	  $(MAXTEXT_BIN)/python tests/run.py -j $(JOBS) tests/trainers/maxtext tests/cli/maxtext_test.py \
	  tests/benchmarks/maxtext_loader_test.py $(MAXTEXT_LOADER)
	for venv in $(MAXTEXT_OTHER_VENVS); do \
	  env -u PYTHONDONTWRITEBYTECODE MAXTEXT_TEST_CACHE=$(CURDIR)/$$venv/programs $$venv/bin/python tests/run.py -j $(JOBS) \
	    $(addprefix tests/trainers/maxtext/,adapter_test.py checkpoints_test.py) || exit 1; \
	done
endif

$(BROWSER_VENV)/.installed: $(VENV)/.installed
	$(BIN)/python -m venv $(BROWSER_VENV)
	$(BROWSER_VENV)/bin/python -m pip install --quiet 'bokeh>=3.9' selenium
	@# Its own packages come first, then those of VENV with all that their .pth files add.
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $$($(BROWSER_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/maxtext_olmo.pth
	@touch $@

test-browser: $(BROWSER_VENV)/.installed ## Open a report in headless Chromium; installs it if it can.
	@command -v chromium chromedriver > /dev/null || { [ $$(id -u) = 0 ] && command -v apt-get > /dev/null \
	  && apt-get install --yes --quiet chromium chromium-driver > /dev/null; } \
	  || echo "test-browser: install chromium and chromedriver, without which the tests are skipped."
	$(BROWSER_VENV)/bin/python tests/run.py -j 1 tests/inspection/report_test.py tests/inspection/browser_test.py \
	  tests/cli/report_test.py tests/inspection/serve_browser_test.py tests/inspection/stats_page_test.py tests/cli/stats_test.py

$(CLOUD_VENV)/.installed: $(VENV)/.installed
	$(BIN)/python -m venv $(CLOUD_VENV)
	$(CLOUD_VENV)/bin/python -m pip install --quiet 'moto[server]>=5' s3fs
	@# Its own packages come first, then those of VENV with all that their .pth files add.
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $$($(CLOUD_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/maxtext_olmo.pth
	@touch $@

# nginx comes from Debian, where this may be done; azurite from npm, into the environment.
.PHONY: cloud-servers
cloud-servers: $(CLOUD_VENV)/.installed
	@command -v nginx > /dev/null || [ -x /usr/sbin/nginx ] || { [ $$(id -u) = 0 ] && command -v apt-get > /dev/null \
	  && apt-get install --yes --quiet --no-install-recommends nginx > /dev/null; } \
	  || echo "test-cloud: install nginx, without which most tests are skipped."
	@[ -x $(CLOUD_VENV)/npm/node_modules/.bin/azurite-blob ] \
	  || npm install --prefix $(CLOUD_VENV)/npm --no-audit --no-fund --loglevel=error azurite > /dev/null \
	  || echo "test-cloud: npm could not install azurite, without which its tests are skipped."

test-cloud: cloud-servers ## Read from object stores on loopback, with faults; installs the servers if it can.
	$(CLOUD_VENV)/bin/python tests/run.py -j $(JOBS) tests/cloud

test-cloud-long: cloud-servers ## The same with an outage of 10 minutes and more variants.
	CLOUD_LONG=1 $(CLOUD_VENV)/bin/python tests/run.py -j 1 --hang-seconds 3600 tests/cloud

test-cluster: $(VENV)/.installed ## Train on hosts in network namespaces that die, lose the network or are slow; needs root.
	@command -v ip > /dev/null || { [ $$(id -u) = 0 ] && command -v apt-get > /dev/null \
	  && apt-get install --yes --quiet --no-install-recommends iproute2 > /dev/null; } \
	  || echo "test-cluster: install iproute2, without which the tests are skipped."
	$(BIN)/python tests/run.py -j 1 tests/cluster

$(FLEET_VENV)/.installed: $(VENV)/.installed
	$(BIN)/python -m venv $(FLEET_VENV)
	$(FLEET_VENV)/bin/python -m pip install --quiet $$($(BIN)/python -c 'import configparser; \
	  c = configparser.ConfigParser(); c.read("setup.cfg"); print(c["options.extras_require"]["fleet"])')
	$(FLEET_VENV)/bin/python -m pip install --quiet --only-binary :all: ray \
	  || echo "test-fleet: there is no wheel of Ray for this Python, without which its tests are skipped."
	@# Its own packages come first, then those of VENV with all that their .pth files add.
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $$($(FLEET_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/maxtext_olmo.pth
	@touch $@

test-fleet: $(FLEET_VENV)/.installed ## Work over a corpus on processes, Dask and Ray; kill workers, drivers and all.
	$(FLEET_VENV)/bin/python tests/run.py -j $(JOBS) tests/fleet tests/corpus/work/engines_test.py

# uv installs the floors of setup.cfg itself; the packages that these need in turn are the newest.
$(LOWEST_VENV)/.installed: RESOLUTION = lowest-direct
$(NEWEST_VENV)/.installed: RESOLUTION = highest
$(LOWEST_VENV)/.installed $(NEWEST_VENV)/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --quiet uv
	$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python --resolution $(RESOLUTION) -r setup.cfg \
	  --extra train --extra tokenizers --extra chat --extra zstd --extra parquet --extra fast --extra cloud --extra eval --extra report
	$(@D)/bin/uv pip install --quiet --python $(@D)/bin/python hypothesis packaging
	@touch $@

# Paths to test instead of all fast tests: make test-lowest TESTS='tests/loader tests/rows'
TESTS ?= tests

test-lowest: $(LOWEST_VENV)/.installed ## Run the fast tests with the oldest releases allowed, on PYTHON.
	$(LOWEST_VENV)/bin/python tests/versions.py --lowest
	JAX_COMPILATION_CACHE_DIR=$(CURDIR)/$(LOWEST_VENV)/programs $(LOWEST_VENV)/bin/python tests/run.py --fast -j $(JOBS) $(TESTS)

test-newest: $(NEWEST_VENV)/.installed ## Run the fast tests with the newest releases allowed, on PYTHON.
	$(NEWEST_VENV)/bin/python tests/versions.py
	JAX_COMPILATION_CACHE_DIR=$(CURDIR)/$(NEWEST_VENV)/programs $(NEWEST_VENV)/bin/python tests/run.py --fast -j $(JOBS) $(TESTS)

# The commands of VENV come first, so that the tutorial runs this checkout's.
$(DOCS_VENV)/.installed: $(VENV)/.installed
	$(BIN)/python -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet $$($(BIN)/python -c 'import configparser; \
	  c = configparser.ConfigParser(); c.read("setup.cfg"); e = c["options.extras_require"]; print(e["docs"], e["dist"])')
	@$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	  > $$($(DOCS_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/maxtext_olmo.pth
	@touch $@

docs: $(DOCS_VENV)/.installed ## Build the documentation site into build/docs; runs the tutorial. Warnings are errors.
	PATH="$(abspath $(BIN)):$$PATH" JAX_PLATFORMS=cpu \
	  $(DOCS_VENV)/bin/python -m sphinx -b html -W --keep-going -n -q docs build/docs
	@echo "The site is in build/docs/index.html."

dist: $(DOCS_VENV)/.installed ## Build sdist and wheel, check them, and run the quickstart with the wheel in a clean environment.
	rm -rf dist
	$(DOCS_VENV)/bin/python -m build --outdir dist .
	$(DOCS_VENV)/bin/python -m twine check --strict dist/*
	WHEEL="$$(ls $(CURDIR)/dist/*.whl)" $(BIN)/python tests/run.py -j 1 tests/dist_test.py

lint: $(VENV)/.installed-lint ## Check format, style, types and the direction of imports.
	$(BIN)/ruff check --output-format=concise maxtext_olmo tests configs docs
	$(BIN)/pyink --check --quiet maxtext_olmo tests configs docs
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-lint ## Format the code.
	$(BIN)/ruff check --fix --quiet maxtext_olmo tests configs docs
	$(BIN)/pyink --quiet maxtext_olmo tests configs docs

bench: $(VENV)/.installed ## Throughput compared with yardsticks and other loaders, bytes sent, waits: about 8 minutes.
	$(BIN)/python tests/benchmarks/throughput.py

bench-peers: $(PEERS)/.installed-bench $(MAXTEXT_VENV)/.installed ## Install the loaders that `make bench` compares with.

bench-startup: $(VENV)/.installed ## Time and memory up to the first batch, with as many instances as the real mix.
	$(BIN)/python tests/benchmarks/startup.py

bench-scale: $(VENV)/.installed ## Cost of a host in fleets of up to 4,096 hosts, and with up to 10^12 instances.
	$(BIN)/python tests/benchmarks/scale.py

bench-order: $(VENV)/.installed ## Time to the first id, ids per second and memory of each order.
	$(BIN)/python tests/benchmarks/order.py

bench-packing: $(VENV)/.installed ## Padding and speed of the packings of documents.
	$(BIN)/python tests/benchmarks/packing.py

bench-lmeval: $(VENV)/.installed ## Padding, shapes and speed of evaluation batches.
	$(BIN)/python tests/benchmarks/lmeval.py

bench-calls: $(VENV)/.installed ## Python calls and objects per step of a trainer.
	$(BIN)/python tests/benchmarks/calls.py

bench-inspect: $(BROWSER_VENV)/.installed ## Time of inspecting a step, searching, reporting, and inverse orders.
	$(BROWSER_VENV)/bin/python tests/benchmarks/inspection.py

bench-cloud: cloud-servers ## Read from an object store on loopback, compared with other readers; MosaicML's needs `make bench-peers`.
	PYTHONPATH=. $(CLOUD_VENV)/bin/python tests/benchmarks/cloud.py --peers $(PEERS)

# With uv: pip tries hundreds of versions of what dolma needs.
$(DOLMA_VENV)/.installed:
	$(PYTHON) -m venv $(DOLMA_VENV)
	$(DOLMA_VENV)/bin/python -m pip install --quiet uv
	$(DOLMA_VENV)/bin/uv pip install --quiet --python $(DOLMA_VENV)/bin/python dolma \
	  || echo "bench-fleet: dolma cannot be installed on Python $(PYTHON_VERSION), and is left out."
	@touch $@

bench-fleet: $(VENV)/.installed $(DOLMA_VENV)/.installed ## Verify, index documents, count and tokenize, compared with reading and with tokenizers alone, and with dolma.
	PYTHONPATH=. $(BIN)/python tests/benchmarks/fleet.py --dolma $(DOLMA_VENV)

bench-maxtext: $(MAXTEXT_VENV)/.installed ## Count and time MaxText's own loader and this one.
	PYTHONPATH=. $(MAXTEXT_BIN)/python tests/benchmarks/maxtext_loader.py

pictures: $(VENV)/.installed ## Draw the pictures of the guides.
	$(BIN)/python docs/pictures.py

screenshots: $(BROWSER_VENV)/.installed ## Take the screenshots of the guides, in headless Chromium.
	PYTHONPATH=. $(BROWSER_VENV)/bin/python docs/screenshots.py

clean: ## Remove the virtual environments and caches.
	rm -rf $(VENV) $(PEERS) $(MAXTEXT_VENV) $(MAXTEXT_VENV)-* $(BROWSER_VENV) $(CLOUD_VENV) $(DOLMA_VENV) $(FLEET_VENV) $(DOCS_VENV) .venv-lowest-* .venv-newest-* .mypy_cache .ruff_cache .hypothesis build *.egg-info
