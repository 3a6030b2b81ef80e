# The whole interface to this repository; CI calls the same targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STAMP_FULL := $(VENV)/.installed-full
# Processes that share the tests out, file by file: tests of a file share fixtures, teams of ranks and what their oracles have computed.
JOBS ?= 2
# In the order in which tests/conftest.py has them.
OPTIONS = -q -n $(JOBS) --dist loadfile --no-loadscope-reorder
# Modules are compiled once, not by each of the processes that tests start.
export PYTHONDONTWRITEBYTECODE =
PYTEST = $(BIN)/python -m pytest $(OPTIONS)
# device="cuda", on a device that the tests compile and load before torch: processes of their own.
CUDATEST = $(BIN)/python -m tests.accelerator $(OPTIONS)
# Triton's kernels, by its interpreter and its compiler, with a Triton of their own: processes of their own.
TRITONTEST = $(BIN)/python -m tests.triton $(OPTIONS)

.PHONY: train test test-fast test-full coverage limits plans check format mutants torture bench bench-step bench-compare bench-cluster test-gpu bench-gpu clean

$(STAMP): pyproject.toml requirements/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint requirements/constraints.txt torch==2.13.0 --editable '.[train,dev,loops,cluster]'
	touch $(STAMP)

# TRL brings pandas, pyarrow and more, diffusers Pillow: only the full suite has their loops, and that of timm, which asks for a torchvision of torch's own build.
# Ray takes 240 MB.
$(STAMP_FULL): $(STAMP)
	$(BIN)/python -m pip install --quiet --constraint requirements/constraints.txt --editable '.[trl,diffusers,browser,ray]'
	$(BIN)/python -m pip install --quiet --no-deps --constraint requirements/constraints.txt timm
	touch $(STAMP_FULL)

train: $(STAMP)
	$(BIN)/python examples/train_stdlib.py

# Of what tests draw, less than `make test-full` has.
test test-fast: export HYPOTHESIS_PROFILE ?= few

test: $(STAMP)
	$(PYTEST) -m 'not campaign'
	$(CUDATEST) -m 'not campaign'

test-fast: $(STAMP)
	$(PYTEST) -m 'not campaign and not slow'
	$(CUDATEST) -m 'not campaign and not slow'

test-full: $(STAMP_FULL)
	$(PYTEST)
	$(CUDATEST)
	$(TRITONTEST)
	$(CUDATEST) tests/gpu -m 'not device_only'

# Branches that were taken before and are not any more, by all of `make test-full`.
coverage: $(STAMP_FULL)
	rm -rf build/coverage && mkdir -p build/coverage
	$(BIN)/coverage run -m pytest $(OPTIONS)
	$(BIN)/coverage combine --quiet
	$(BIN)/python -m tests.branches build/coverage/data

# The budgets and the plans of the rows of the parity matrix, where a change of them is meant.
limits: $(STAMP)
	$(BIN)/python -W ignore -m tests.parity.limits

plans: $(STAMP)
	$(BIN)/python -W ignore -m tests.parity.plans

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

# Ranks killed at COUNT moments of training and saving, and of elastic jobs, which SEED decides.
SEED ?= 0
COUNT ?= 60

torture: $(STAMP)
	$(BIN)/python -m tests.session.kills $(SEED) $(COUNT)
	$(BIN)/python -m tests.elastic.torture $(SEED) $(COUNT)

bench: $(STAMP)
	$(BIN)/python benchmarks/overhead.py

bench-step: $(STAMP)
	$(BIN)/python benchmarks/step.py

# DeepSpeed is built with the torch that is there. Where it cannot be installed, its rows say so.
bench-compare: $(STAMP)
	-$(BIN)/python -m pip install --quiet --constraint requirements/constraints.txt setuptools wheel
	-DS_ACCELERATOR=cpu $(BIN)/python -m pip install --quiet --no-build-isolation --constraint requirements/constraints.txt --editable '.[compare]'
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python benchmarks/compare.py

# PROFILES: a copy of the Pollux artifact's tables and workloads (petuum/adaptdl, branch osdi21-artifact, simulator/), which may not come with this.
PROFILES ?=

bench-cluster: $(STAMP)
	$(BIN)/python benchmarks/cluster.py --write $(if $(PROFILES),--profiles $(PROFILES))
	$(BIN)/python docs/make_tables.py

# On a GPU, with this machine's own Python and torch: no .venv, no network, no compiler. OUT: a folder for results, in place of the usual one.
ON_GPU = PYTHONPATH=src:. $(PYTHON) -m
STAGES ?=
PARTS ?=

test-gpu:
	$(ON_GPU) tests.gpu $(if $(OUT),--out $(OUT)) $(STAGES)

bench-gpu:
	$(ON_GPU) benchmarks.gpu $(if $(OUT),--out $(OUT)) $(PARTS)

clean:
	rm -rf $(VENV) build dist runs
