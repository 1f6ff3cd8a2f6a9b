# `make demo` and `make test` on a fresh machine: Python 3.11+, nothing else. Both install into .venv when it is missing.
PYTHON ?= python3
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
export VIRTUAL_ENV := $(CURDIR)/.venv

.PHONY: demo test test-full test-full-parity test-full-rest gpu check format parity venv clean

demo: venv
	scripts/quickstart.sh

# Two processes share the test files: two cores stand half idle under one, which mostly waits for the ranks that it started
TEST_WORKERS ?= 2

# On the CPU of any machine; `DS_ACCELERATOR=cuda make test` lets the tests see its GPUs
test: venv
	python -m pytest -m "not full" -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --durations=15

# Everything, in two halves of about an hour each on 2 cores, which can be run apart: what is held against one process, and
# the rest (checkpoints, plans, launchers, all pairs of keys)
AGAINST_ONE_PROCESS := tests/models $(addprefix tests/training/,engine objectives optim parity)
TEST_FULL = python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --durations=20

test-full: test-full-parity test-full-rest

test-full-parity: venv
	$(TEST_FULL) $(AGAINST_ONE_PROCESS)

test-full-rest: venv
	$(TEST_FULL) $(AGAINST_ONE_PROCESS:%=--ignore=%)

# On a machine with a GPU: is it right, is it fast, and why; benchmarks/gpu.py --help
gpu: venv
	python benchmarks/gpu.py

# What CI asks of the source itself; `make format` fixes most of it
check: venv
	python -m pip install --quiet ruff==0.17.6 mypy==2.4.1
	ruff format --check .
	ruff check .
	mypy

format: venv
	python -m pip install --quiet ruff==0.17.6
	ruff check --fix .
	ruff format .

# Every family against Hugging Face, as figures: docs/parity.md
parity: venv
	python tests/support/parity_table.py --output docs/parity.md

venv: $(BIN)/.installed

$(BIN)/.installed: requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -r requirements.txt
	touch $@

clean:
	rm -rf outputs .pytest_cache
