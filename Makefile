# make demo: from nothing to a trained translator.  make test: from nothing to green tests.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
INSTALLED = $(VENV)/.installed
# Each file in one process, in the order of tests/conftest.py
PARALLEL = -n auto --dist loadfile --no-loadscope-reorder

.PHONY: install demo docs benchmark test test-slow test-ci test-all check check-style floors format wheel clean torture gpu

install: $(INSTALLED)

$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade "pip>=23" "setuptools>=78.1.1" -c constraints.txt
	$(BIN)/python -m pip install --quiet --editable ".[dev,docs,tensorboard]" -c constraints.txt
	touch $@

demo: $(INSTALLED)
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python scripts/demo.py

# A site with search that needs no network, in build/site; fails for a link that leads nowhere
docs: $(INSTALLED)
	$(BIN)/python scripts/build_docs.py

# Other toolkits are installed into ~/.cache/nmt-benchmark; BENCHMARK=--quick gives a first look
benchmark: $(INSTALLED)
	$(BIN)/python scripts/benchmark/run.py $(BENCHMARK)

# Tests start many processes, each of which would compile all modules again
test test-slow test-ci test-all: export PYTHONDONTWRITEBYTECODE =

# On a machine with a GPU and no network: wheels=DIR text=DIR output=DIR; docs/benchmarks/gpu.md
gpu:
	$(PYTHON) scripts/gpu.py $(foreach name,wheels text output,$(if $($(name)),--$(name) $($(name))))

# Generate files for readers, then damage files and kill commands for an hour; TORTURE="--minutes 5"
torture: $(INSTALLED)
	NMT_FUZZ_EXAMPLES=20000 $(BIN)/python -m pytest tests/test_fuzz.py tests/test_fuzz_http.py
	$(BIN)/python scripts/torture.py $(TORTURE)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL)

test-slow: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL) -m "slow and not long"

# Both at once, which imports modules and trains the shared models once
test-ci: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL) -m "not long"

test-all: $(INSTALLED)
	$(BIN)/python -m pytest $(PARALLEL) -m ""

check: check-style test

# The quick tests with the lowest versions that setup.cfg allows; before a release
floors:
	$(PYTHON) -m venv .venv-floors
	$(PYTHON) scripts/floors.py > .venv-floors/floors.txt
	.venv-floors/bin/python -m pip install --quiet --editable ".[dev,serve,export,cluster,tensorboard]" -c .venv-floors/floors.txt
	.venv-floors/bin/python -m pytest $(PARALLEL)

check-style: $(INSTALLED)
	$(BIN)/ruff format --check nmt configs scripts tests
	$(BIN)/ruff check nmt configs scripts tests
	$(BIN)/mypy --strict nmt

format: $(INSTALLED)
	$(BIN)/ruff format nmt configs scripts tests
	$(BIN)/ruff check --fix nmt configs scripts tests
	$(BIN)/python scripts/wrap.py *.md docs/*.md docs/tutorials/*.md docs/how-to/*.md docs/benchmarks/README.md
	$(BIN)/python scripts/tour.py
	$(BIN)/python scripts/reference.py
	$(BIN)/python scripts/api.py

# The same bytes for the same commit, wherever and whenever it is built
wheel: $(INSTALLED)
	rm -rf dist
	$(BIN)/python scripts/build.py --output dist

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
