# `make demo` shows the product, `make test` checks it. Each sets up what it needs, in any order.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The package alone, for the demo; and with Ray and the tools of the tests.
RUNTIME := $(VENV)/.runtime
STAMP := $(VENV)/.installed
# Hundreds of processes of the tests import the same modules: compiled once, they start in 0.6 s instead of 1.6 s.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

.PHONY: demo test test-quick test-root check histories mutants chaos soak rehearsal setup runtime bench bench-queue bench-roles bench-adopt bench-migrations bench-control bench-api bench-http bench-live bench-ray docs release-files clean

demo: runtime
	@$(BIN)/windlass demo

# Tests spend most of their time waiting for processes and limits, so six at once keep two cores busy.
# The first command compiles the assertions of all test files once, instead of once in each process.
test: setup
	$(BIN)/pytest --collect-only -qq >/dev/null & $(MAKE) --no-print-directory check; status=$$?; wait; exit $$status
	@sh tools/system-packages.sh
	$(BIN)/pytest -n 6 --dist worksteal --durations=40 --durations-min=3

# For everyday work: everything but slow tests, and no end-to-end tests.
test-quick: check
	$(BIN)/pytest -q -n 2 --dist worksteal -m "not slow" tests/unit tests/conformance

# The few tests that only root can run.
test-root: setup
	$(BIN)/pytest -n 2 -m needs_root tests/postgres tests/e2e

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/wording.py
	$(BIN)/python tools/structure.py

# 1,200 random histories, 200 of each world, and the coverage of faults. Broken seeds are shrunk.
# One world, other seeds: make histories ARGUMENTS="--world storm --first 5000 --seeds 1000"
histories: setup
	PYTHONPATH=tests $(BIN)/python -m support.simulator.campaign --seeds 200 --jobs 2 $(ARGUMENTS)

# Deliberate defects in a copy of the tree: each must be caught by its tests. About half an hour on two cores.
# One of them: make mutants ARGUMENTS="--only complete-without-token"
mutants: setup
	$(BIN)/python tools/mutants/run.py $(ARGUMENTS)

# Real processes under faults, one after another, for 10 minutes; the promises are checked at the end (docs/chaos.md).
# make chaos ARGUMENTS="--minutes 2 --only fail-over"
chaos: setup
	$(BIN)/python -m bench.chaos $(ARGUMENTS)

# 10 minutes of load: are memory, cycle time and tables flat? make soak ARGUMENTS="--minutes 3 --burst 20000"
soak: setup
	$(BIN)/python -m bench.soak $(ARGUMENTS)

# A table moves in while code and release change, on the emulated Runpod. Prints its figures.
rehearsal: setup
	$(BIN)/pytest -q -s tests/e2e/test_move_in.py

bench: bench-queue bench-roles bench-adopt bench-migrations bench-control bench-api bench-http bench-live bench-ray

bench-queue: setup
	@$(INSTALL) ".[bench]"
	$(BIN)/python -m bench.queue

bench-roles: setup
	$(BIN)/python -m bench.roles

bench-adopt: setup
	$(BIN)/python -m bench.adopt

# On 5,000,000 tasks. Fewer: make bench-migrations ARGUMENTS=500000
bench-migrations: setup
	$(BIN)/python -m bench.migrations $(ARGUMENTS)

bench-control: setup
	$(BIN)/python -m bench.control

bench-api: setup
	$(BIN)/python -m bench.http_api

# About 25 minutes. Each part runs, also if an earlier one missed its goal.
bench-http: setup
	@status=0; for part in http_load http_clients heartbeats hostile_clients kill_processes; do \
	  $(BIN)/python -m bench.$$part || status=1; \
	done; exit $$status

bench-live: setup
	$(BIN)/python -m bench.live_updates

bench-ray: setup
	$(BIN)/python -m bench.ray

# The documentation site, in site/. Broken links and anchors fail. Generated pages: python tools/reference.py.
docs: setup
	$(BIN)/python tools/reference.py --check
	$(BIN)/python -m mkdocs build --strict --quiet

# Source archive, wheel, SBOM and checksums in dist/release (docs/releasing.md).
release-files: setup
	$(BIN)/python tools/release_files.py $(ARGUMENTS)

runtime: $(RUNTIME)

setup: $(STAMP)

$(RUNTIME): pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing windlass into $(VENV) (less than a minute, once)"
	@$(INSTALL) .
	@touch $(RUNTIME)

# First every package with its hash, then the project: pip cannot check hashes and install an editable project at once.
$(STAMP): pyproject.toml constraints.txt constraints-hashed.txt | $(BIN)/python
	@echo "installing windlass, Ray and the tools of the tests into $(VENV) (one to three minutes, once)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes \
	  --requirement constraints-hashed.txt
	@$(INSTALL) ".[dev]"
	@touch $(RUNTIME) $(STAMP)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "windlass needs Python 3.11 or newer; name one with: make PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "python3 -m venv failed; on Debian: apt-get install python3-venv"; exit 2; }

clean:
	rm -rf $(VENV) site dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
