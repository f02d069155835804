# `make demo` shows the product, `make test` checks it. Each sets up what it needs, in any order.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The package alone, for the demo; and with Ray and the tools of the tests.
RUNTIME := $(VENV)/.runtime
STAMP := $(VENV)/.installed
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable

.PHONY: demo test check histories setup runtime bench bench-queue bench-roles bench-control bench-api bench-http bench-live bench-ray clean

demo: runtime
	@$(BIN)/windlass demo

# Tests spend half of their time waiting for processes and limits, so three at once keep two cores busy.
test: check
	@sh tools/system-packages.sh
	$(BIN)/pytest -n 3 --dist worksteal

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/wording.py
	$(BIN)/python tools/structure.py

# A thousand random histories of each cloud: about twenty minutes on two cores.
histories: setup
	WINDLASS_SEEDS=1000 $(BIN)/pytest -n 2 -q tests/simulator/test_runpod_histories.py tests/simulator/test_hetzner_histories.py

bench: bench-queue bench-roles bench-control bench-api bench-http bench-live bench-ray

bench-queue: setup
	@$(INSTALL) ".[bench]"
	$(BIN)/python -m bench.queue

bench-roles: setup
	$(BIN)/python -m bench.roles

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
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
