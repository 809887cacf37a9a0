PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
TOOLS := build/tools/bin

.PHONY: run test lint docs leaderboard evidence slow bench sbom audit clean

# What five papers claim of their methods, on embedded data and models. Two processes share the runs, then the results are
# shown; a line is printed for every second run.
PAPERS = $(BIN)/promptfed compare papers engine.workers=1 --out runs/papers
run: $(STAMP)
	@mkdir -p runs
	@$(PAPERS) > runs/papers.log 2>&1 & $(PAPERS) 2>&1 | grep --line-buffered -E 'round ([0-9]+)/\1 ' || true; wait
	@$(PAPERS)
	@echo 'On your own images: $(BIN)/promptfed choose --minutes 10 dataset=FOLDER backbone=facebook/deit-tiny-patch16-224'

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

# docs/leaderboard.md, from the results that are kept in experiments/leaderboard.
leaderboard: $(STAMP)
	$(BIN)/python scripts/leaderboard.py

# The tables of experiments/evidence/README.md and docs/images/claims.svg, from the results that are kept beside that page.
evidence: $(STAMP)
	$(BIN)/python scripts/evidence.py

slow: $(STAMP)
	$(BIN)/pytest -m slow

bench: $(STAMP)
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/many_clients.py
	$(BIN)/python benchmarks/frozen.py
	$(BIN)/python benchmarks/peers.py --parts fedavg pfedpt

# All installed packages in the CycloneDX format, in build/sbom.json.
sbom: $(TOOLS)
	mkdir -p build
	$(TOOLS)/cyclonedx-py environment --pyproject pyproject.toml --of JSON -o build/sbom.json $(BIN)/python

# Weak spots in the source, of medium severity and above; then known vulnerabilities of what is installed, which needs the network.
audit: $(TOOLS)
	$(TOOLS)/bandit --quiet --recursive --severity-level medium src
	$(TOOLS)/pip-audit --path "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"

# Apart from the environment, so that they are not part of what they describe.
$(TOOLS): $(STAMP)
	$(PYTHON) -m venv build/tools
	$(TOOLS)/pip install --quiet --disable-pip-version-check bandit cyclonedx-bom pip-audit

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "promptfed needs Python 3.11 or newer")'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
