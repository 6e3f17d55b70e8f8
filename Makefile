# Everything runs inside .venv, which the first target that needs it makes.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt

BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet $(if $(CONSTRAINTS),-c $(CONSTRAINTS))

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint soak bench study-fast studies tables docs clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: .venv/.test ## make .venv with the library and what its demo and tests need

demo: .venv/.setup ## run the demonstration
	$(BIN)/python -m grapnet demo

test: export OMP_NUM_THREADS = 1
test: .venv/.test ## run the tests and the doctests
	$(BIN)/python -m pytest -n 2 --dist loadgroup --doctest-modules tests grapnet

lint: .venv/.test .venv/.lint ## check style, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright

soak: .venv/.test ## run the long random test and write results/soak.json
	@mkdir -p results
	$(BIN)/python -m tests.soak --json results/soak.json

bench: .venv/.test ## measure edits, execution, rules and grafts, checking their results, and write benchmarks/results/
	@mkdir -p benchmarks/results
	$(BIN)/python -m benchmarks.run edits --check --json benchmarks/results/edits.json
	$(BIN)/python -m benchmarks.run execution --check --json benchmarks/results/execution.json
	$(BIN)/python -m benchmarks.run rules --check --json benchmarks/results/rules.json
	$(BIN)/python -m benchmarks.run graft --check --json benchmarks/results/graft.json

study-fast: export OMP_NUM_THREADS = 1
study-fast: .venv/.test ## run the fast form of every study, in seconds; the tests do so as well
	$(BIN)/python -m grapnet.studies.all --fast

studies: .venv/.test ## run every study in full, for hours, resuming from build/studies, and write results/
	$(BIN)/python -m grapnet.studies.all --results results --resume build/studies
	$(BIN)/python -m grapnet.studies.tables --check

tables: .venv/.test ## set the committed results beside the paper's figures and check every bar
	$(BIN)/python -m grapnet.studies.tables --check --markdown build/tables.md --html build/tables.html

docs: .venv/.docs ## build the documentation into site/
	$(BIN)/mkdocs build --strict

clean: ## remove caches and built files; .venv and results stay
	rm -rf build dist site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

# The build tools come first and build without isolation, so that they too are held to the constraints.
.venv/.setup: pyproject.toml $(CONSTRAINTS) CMakeLists.txt $(wildcard grapnet/execution/csrc/*)
	@echo "Installing into .venv; the first time takes a minute or two"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(PIP) scikit-build-core nanobind cmake ninja
	@$(PIP) --no-build-isolation -e '.[demo]'
	@touch $@

.venv/.test .venv/.lint .venv/.docs: .venv/.%: .venv/.setup
	@echo "Installing what $* needs into .venv"
	@$(PIP) --no-build-isolation -e '.[$*]'
	@touch $@
