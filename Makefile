# Everything runs inside .venv, which the first target that needs it makes.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt

BIN := .venv/bin
PYTEST := -m pytest -n 2 --dist loadgroup
PIP := $(BIN)/python -m pip --disable-pip-version-check install $(if $(CONSTRAINTS),-c $(CONSTRAINTS))

.DEFAULT_GOAL := help
.PHONY: help setup demo test numerics coverage mutants signs optimizers lint soak interrupts readers bench study-fast studies tables docs clean

help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

setup: .venv/.test ## make .venv with the library and what its demo and tests need

demo: .venv/.setup ## run the demonstration
	$(BIN)/python -m grapnet demo

test: export OMP_NUM_THREADS = 1
test: .venv/.test ## run the tests and the doctests
	$(BIN)/python $(PYTEST) --doctest-modules tests grapnet studies

NUMERIC := tests/core tests/execution tests/following tests/continual tests/rules tests/convert tests/studies tests/integrations

numerics: export OMP_NUM_THREADS = 1
numerics: .venv/.test .venv/.without-kernels ## run the numeric tests as on other CPUs, and without compiled kernels
	ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 $(BIN)/python $(PYTEST) --kernels=avx2 $(NUMERIC)
	ATEN_CPU_CAPABILITY=default $(BIN)/python $(PYTEST) --kernels=baseline $(NUMERIC)
	build/without-kernels/bin/python $(PYTEST) --kernels=none $(NUMERIC)

coverage: export OMP_NUM_THREADS = 1
coverage: .venv/.test ## run the tests and write build/coverage.json
	$(BIN)/python $(PYTEST) --doctest-modules tests grapnet studies \
		--cov=grapnet --cov-report=term --cov-report=json:build/coverage.json

mutants: .venv/.test ## change the library in 448 small ways, for hours, and write which changes the tests notice
	$(BIN)/python -m tools.mutants --json tools/results/mutants.json

signs: .venv/.test ## count lines, files, packed lines and importers, and write tools/results/signs.json
	$(BIN)/python -m tools.signs --json tools/results/signs.json

optimizers: export OMP_NUM_THREADS = 1
optimizers: .venv/.test .venv/.optimizers ## run the optimizers of torch and of other packages through edits, and write which follow
	$(BIN)/python -m tools.optimizers --json tools/results/optimizers.json --docs docs/guides/optimizers.md

lint: .venv/.test .venv/.lint ## check style, formatting and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/basedpyright

soak: .venv/.test ## run the long random tests and write results/soak.json, soak-spaces.json and matrix.json
	@mkdir -p results
	$(BIN)/python -m tests.soak --json results/soak.json
	$(BIN)/python -m tests.soak --spaces --json results/soak-spaces.json
	$(BIN)/python -m tests.soak --matrix --json results/matrix.json

readers: .venv/.test ## read nets in several threads beside 10,000 edits per backend and write tools/results/readers.json
	$(BIN)/python -m tools.readers --reads 100000 --edits 10000 --json tools/results/readers.json

interrupts: .venv/.test ## interrupt edits, trials, grafts and restores 11,000 times and write tools/results/interrupts.json
	$(BIN)/python -m tools.interrupts 10000 --signals 1000 --jobs 2 --json tools/results/interrupts.json

bench: .venv/.test ## measure edits, execution, rules, repair, files, grafts and models, checking their results, and write benchmarks/results/
	@mkdir -p benchmarks/results
	$(BIN)/python -m benchmarks.run edits --check --json benchmarks/results/edits.json
	$(BIN)/python -m benchmarks.run execution --check --json benchmarks/results/execution.json
	$(BIN)/python -m benchmarks.run rules --check --json benchmarks/results/rules.json
	$(BIN)/python -m benchmarks.run repair --check --json benchmarks/results/repair.json
	$(BIN)/python -m benchmarks.run files --check --json benchmarks/results/files.json
	$(BIN)/python -m benchmarks.run graft --check --json benchmarks/results/graft.json
	$(BIN)/python -m benchmarks.run models --check --json benchmarks/results/models.json

study-fast: export OMP_NUM_THREADS = 1
study-fast: .venv/.test ## run the fast form of every study, in seconds; the tests do so as well
	$(BIN)/python -m studies.run --fast

studies: .venv/.test ## run the paper's studies in full, for hours, resuming from build/studies, write results/ and check every bar
	$(BIN)/python -m studies.run --results results
	$(BIN)/python -m studies.run --read results --check

tables: .venv/.test ## set the committed results beside the paper's figures and name every bar that one misses
	$(BIN)/python -m studies.run --read results --check --markdown build/tables.md

docs: .venv/.docs ## build the documentation into site/
	$(BIN)/mkdocs build --strict

clean: ## remove caches and built files; .venv and results stay
	rm -rf build dist site .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

# The build tools come first and build without isolation, so that they too are held to the constraints.
.venv/.setup: pyproject.toml $(CONSTRAINTS) CMakeLists.txt $(wildcard grapnet/execution/csrc/*)
	@echo "== 1 of 3: making .venv"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "== 2 of 3: installing the build tools"
	@$(PIP) scikit-build-core nanobind cmake ninja
	@echo "== 3 of 3: installing torch and the rest, then compiling the kernels: minutes, most of it downloads"
	@$(PIP) --no-build-isolation -e '.[demo]'
	@touch $@

.venv/.test .venv/.lint .venv/.docs .venv/.optimizers: .venv/.%: .venv/.setup
	@echo "== installing what $* needs"
	@$(PIP) --no-build-isolation -e '.[$*]'
	@touch $@

# Another environment that borrows the packages of .venv and has the library as it installs without a compiler.
.venv/.without-kernels: .venv/.test
	@echo "== installing the library without a compiler into build/without-kernels"
	@$(BIN)/python -m venv --clear build/without-kernels
	@$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$(build/without-kernels/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
	@CC=/bin/false CXX=/bin/false build/without-kernels/bin/python -m pip install --no-deps --no-build-isolation \
		--config-settings build-dir=build/without-kernels/build -e .
	@touch $@
