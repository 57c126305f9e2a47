# make demo: the whole job on this machine.  make test: the tests.  make test-all: also those that repeat a quicker one on
# more ranks.  make lint, make types: what CI checks besides.
# make bench-linear, bench-grid, bench-sharding, bench-bucket: step time, bytes on the wire, memory, over slow links (root;
# docs/benchmarks.md).  make bench-planner: step times predicted and measured (root too).  make bench-agreement: what it
# costs that ranks agree before they communicate.
# make fuzz: FUZZ random products on real ranks against dense float64.  make fuzz-store: FUZZ_STORE ill-behaved training
# programs over sharded parameters against plain modules.
# Each target makes the virtual environment it needs; it is installed again only when pyproject.toml changes.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet
DEMO_ARGS ?=
TEST_ARGS ?=
BENCH_ARGS ?=
FUZZ ?= 10000
FUZZ_STORE ?= 3000

.PHONY: demo test test-all fuzz fuzz-store lint types bench-linear bench-grid bench-sharding bench-bucket bench-agreement \
	bench-planner

demo: $(VENV)/installed
	$(BIN)/shardwright demo $(DEMO_ARGS)

test: $(VENV)/installed-test
	$(BIN)/python -m pytest -n 2 --dist worksteal $(TEST_ARGS)

test-all: $(VENV)/installed-test
	$(BIN)/python -m pytest -n 2 --dist worksteal --slow $(TEST_ARGS)

fuzz: $(VENV)/installed-test
	cd tests && ../$(BIN)/python -m support.fuzz --draws $(FUZZ)

fuzz-store: $(VENV)/installed-test
	cd tests && ../$(BIN)/python -m support.fuzz_store --draws $(FUZZ_STORE)

bench-linear: $(VENV)/installed-bench
	$(BIN)/python bench/linear.py $(BENCH_ARGS)

bench-grid: $(VENV)/installed-bench-grid
	$(BIN)/python bench/grid.py $(BENCH_ARGS)

bench-sharding: $(VENV)/installed
	$(BIN)/python bench/sharding.py $(BENCH_ARGS)

bench-bucket: $(VENV)/installed-bench
	$(BIN)/python bench/bucket.py $(BENCH_ARGS)

bench-agreement: $(VENV)/installed
	$(BIN)/python bench/agreement.py $(BENCH_ARGS)

bench-planner: $(VENV)/installed
	$(BIN)/python bench/planner.py $(BENCH_ARGS)

lint: $(VENV)/installed-dev
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

types: $(VENV)/installed-dev
	$(BIN)/python -m mypy

# torch comes first and pinned: later resolutions then keep it.
$(VENV)/installed-torch:
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch==2.13.0
	touch $@

$(VENV)/installed: pyproject.toml $(VENV)/installed-torch
	$(PIP) --editable .
	touch $@

$(VENV)/installed-test: pyproject.toml $(VENV)/installed-torch
	$(PIP) --editable '.[test]'
	touch $@ $(VENV)/installed

$(VENV)/installed-dev: pyproject.toml $(VENV)/installed-torch
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/installed-test $(VENV)/installed

# Peers to measure against; what they need here is there already.
$(VENV)/installed-bench: $(VENV)/installed
	$(PIP) --no-deps megatron-core==0.16.1 fairscale==0.4.13
	touch $@

# So is axonn; its linears need torch and numpy only.
$(VENV)/installed-bench-grid: $(VENV)/installed
	$(PIP) --no-deps axonn==0.2.0
	touch $@
