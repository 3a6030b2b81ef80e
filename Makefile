# The whole interface to this repository; CI calls the same targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: train test test-fast test-full check format mutants bench bench-step clean

$(STAMP): pyproject.toml requirements/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint requirements/constraints.txt torch==2.13.0 --editable '.[train,dev]'
	touch $(STAMP)

train: $(STAMP)
	$(BIN)/python examples/train_stdlib.py

test: $(STAMP)
	$(BIN)/python -m pytest -q -m 'not campaign'

test-fast: $(STAMP)
	$(BIN)/python -m pytest -q -m 'not campaign and not slow'

test-full: $(STAMP)
	$(BIN)/python -m pytest -q

check: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict -p patrickstar.core -p patrickstar.plan -p patrickstar.config
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

mutants: $(STAMP)
	$(BIN)/python -m tests.mutants

bench: $(STAMP)
	$(BIN)/python benchmarks/overhead.py

bench-step: $(STAMP)
	$(BIN)/python benchmarks/step.py

clean:
	rm -rf $(VENV) build dist runs
