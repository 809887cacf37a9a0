PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: run test lint docs slow bench clean

# Offline comparison of prompt methods on the embedded model, with eight drawing styles as clients.
run: $(STAMP)
	$(BIN)/promptfed compare quickstart --out runs/quickstart

# All checks.
test: lint
	$(BIN)/pytest -m "not slow" -n auto --maxprocesses 4 --dist worksteal

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as a site in build/docs; warnings are errors. A test also builds it.
docs: $(STAMP)
	$(BIN)/python -m sphinx -E -W --keep-going -n -q docs build/docs

slow: $(STAMP)
	$(BIN)/pytest -m slow

bench: $(STAMP)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/many_clients.py
	$(BIN)/python benchmarks/frozen.py
	$(BIN)/python benchmarks/peers.py --parts fedavg pfedpt

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "promptfed needs Python 3.11 or newer")'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
