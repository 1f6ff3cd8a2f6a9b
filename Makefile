# `make demo` and `make test` on a fresh machine: Python 3.11+, nothing else. Both install into .venv when it is missing.
PYTHON ?= python3
BIN := .venv/bin
export PATH := $(CURDIR)/$(BIN):$(PATH)
export VIRTUAL_ENV := $(CURDIR)/.venv

# A folder of wheels (scripts/collect_wheels.py): where it holds some, .venv is made of them and of the packages that
# $(PYTHON) has, torch among them, and nothing is downloaded
WHEELS ?= wheels
ifneq ($(wildcard $(WHEELS)/*.whl),)
VENV_OPTIONS := --system-site-packages
INSTALLED = --no-index --no-deps $(WHEELS)/*.whl
else
INSTALLED = -r requirements.txt
$(BIN)/.installed-dev: INSTALLED += --group dev
$(BIN)/.installed-dev: UPGRADE_PIP = $(BIN)/python -m pip install --quiet "pip>=25.1"
endif

# Else pip ends after minutes with versions that it ignores
CHECK_PYTHON = @$(PYTHON) -c "import sys; sys.exit(None if sys.version_info >= (3, 11) else \
	'Python 3.11 or later is needed, and $(PYTHON) is ' + sys.version.split()[0] + '; make PYTHON=python3.12 ...')"

.PHONY: demo test test-full test-full-parity test-full-rest gpu check format parity docs lock venv venv-dev clean

demo: venv
	scripts/quickstart.sh

# Two processes share the test files: two cores stand half idle under one, which mostly waits for the ranks that it
# started. A third takes a sixth less, and then a test of what a run does within seconds failed once
TEST_WORKERS ?= 2

# On the CPU of any machine; `DS_ACCELERATOR=cuda make test` lets the tests see its GPUs
test: venv-dev
	python -m pytest -m "not full" -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --durations=15

# Everything, in two halves, which can be run apart: what is held against one process (families, pairs of
# keys, layouts), and the rest (checkpoints, plans, launchers, commands of the pages)
AGAINST_ONE_PROCESS := tests/models $(addprefix tests/extensions/,classification distillation preferences retrieval) \
	tests/test_list_models.py tests/test_without_extensions.py \
	$(addprefix tests/training/,engine objectives optim parity test_combinations.py)
TEST_FULL = python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder --durations=20

test-full: test-full-parity test-full-rest

test-full-parity: venv-dev
	$(TEST_FULL) $(AGAINST_ONE_PROCESS)

test-full-rest: venv-dev
	$(TEST_FULL) $(AGAINST_ONE_PROCESS:%=--ignore=%)

# On a machine with a GPU: is it right, is it fast, and why; benchmarks/gpu.py --help. In $(PYTHON) as it is where that
# has what a run needs; else in .venv
gpu:
	$(CHECK_PYTHON)
	if $(PYTHON) scripts/missing_packages.py; then $(PYTHON) benchmarks/gpu.py $(GPU_OPTIONS); \
	else $(MAKE) venv-dev && $(BIN)/python benchmarks/gpu.py $(GPU_OPTIONS); fi

# What CI asks of the source itself; `make format` fixes most of it
check: venv-dev
	ruff format --check .
	ruff check .
	mypy

format: venv-dev
	ruff check --fix .
	ruff format .

# Every family against Hugging Face, as figures: docs/parity.md
parity: venv-dev
	python tests/support/parity_table.py --output docs/parity.md

# The pages as a site in outputs/site, to be searched (`python -m http.server --directory outputs/site`); a link that leads
# nowhere, or a page without a place in the table of docs/README.md, ends it
docs: venv-dev
	python -m pip install --quiet --group docs
	NO_MKDOCS_2_WARNING=1 mkdocs build --quiet

# requirements.lock: what requirements.txt needs on any machine, with hashes, without torch and what its builds bring
# along. Keeps the locked versions as far as requirements.txt lets it; `make lock UPGRADE=--upgrade` takes newer ones
lock: venv-dev
	echo torch | uv pip compile requirements.txt --quiet --universal --python-version 3.11 --generate-hashes --excludes - \
		--custom-compile-command "make lock" --output-file requirements.lock $(UPGRADE)

# What a user needs; then what tests, checks and `make gpu` need too
venv: $(BIN)/.installed

venv-dev: $(BIN)/.installed-dev

$(BIN)/.installed: requirements.txt
$(BIN)/.installed-dev: requirements.txt pyproject.toml

$(BIN)/.installed $(BIN)/.installed-dev:
	$(CHECK_PYTHON)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV_OPTIONS) .venv
	$(UPGRADE_PIP)
	$(BIN)/python -m pip install --quiet $(INSTALLED)
	touch $@

clean:
	rm -rf outputs .pytest_cache
