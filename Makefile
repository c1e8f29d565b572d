# make demo: install and run the main job on an example. make test: install what tests need, lint, types, all tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# on the Python that the lock files are for, packages come in their versions, and their files have their hashes
LOCKED = if $(BIN)/python packaging/is_locked.py; then \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r packaging/locks/$(1).txt; fi

.PHONY: docs pictures man schemas demo test lint types kernels tests long ray versions bench mutants fuzz invariants random-traces clean

demo: $(VENV)/installed
	$(BIN)/forerun plan examples/llama-3.1-8b/config.json --cluster h100-sxm --gpus 64 --seq-len 8192 --global-batch 256

test: lint types tests

lint: $(VENV)/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed-test
	$(BIN)/mypy

# Tests start many Pythons, which share what was compiled; slow files come first, so that both workers end together.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

tests: kernels
	$(PYTEST)

# object code for the kernels, and YAML files parsed, where a source has changed since the package was installed
kernels: $(VENV)/installed-test
	$(BIN)/python -m forerun.common.build_ahead

# what make test leaves out: long tests, and the search on Ray (79 MB)
long: kernels
	$(PYTEST) -m long

ray: $(VENV)/installed-ray
	$(BIN)/python -m pytest tests/answers/search/test_search_ray.py tests/interfaces/report/test_schedulers.py

# tracing with every release of torch that is supported, one after the other; make versions TORCH=2.14 tests one of them
TORCH ?= 2.10 2.11 2.12 2.13 2.14 2.15
versions:
	for release in $(TORCH); do PYTHON=$(PYTHON) .ci/torch-version $$release || exit 1; done

bench: kernels
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/events.py
	$(BIN)/python benchmarks/predict.py
	$(BIN)/python benchmarks/dse.py
	$(BIN)/python benchmarks/collectives.py
	$(BIN)/python benchmarks/trace.py --quick
	$(BIN)/python benchmarks/search.py
	$(BIN)/python benchmarks/serve.py

# which small mistakes in a package its tests miss: make mutants PACKAGE="core/engine core/cost" N=30 SEED=1
PACKAGE ?= core/engine
N ?= 20
SEED ?= 0
mutants: $(VENV)/installed-test
	$(BIN)/python benchmarks/mutants $(PACKAGE) --number $(N) --seed $(SEED)

# the documentation site, in build/site; it asks no other machine for anything
docs: $(VENV)/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

# the pictures of the start pages, by the walks through the planner in the browser
pictures: kernels
	FORERUN_WALK_PICTURES=docs/pictures/walk $(BIN)/python -m pytest -m 'long or not long' \
		tests/interfaces/serve/test_walk_through.py

# man pages of all commands, in build/man
man: $(VENV)/installed
	$(BIN)/python docs/write_man.py build/man

# what --json prints, as JSON Schemas in docs/schemas, which only grow
schemas: $(VENV)/installed-test
	$(BIN)/python docs/write_schemas.py

# commands on mutated inputs: make fuzz N=100000 SEED=3; what breaks something is kept in tests/fuzz/corpus
fuzz: $(VENV)/installed-test
	$(BIN)/python tests/fuzz $(N) --seed $(SEED) --keep tests/fuzz/corpus

# what must hold for every plan, over random plans: make invariants N=5000 SEED=1
invariants: $(VENV)/installed-test
	$(BIN)/python tests/fuzz/invariants.py $(N) --seed $(SEED)

# what must hold for every trace, over random programs: make random-traces N=10000 SEED=1
random-traces: $(VENV)/installed-test
	$(BIN)/python tests/sources/trace/random_steps.py $(N) --seed $(SEED)

clean:
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e .
	@touch $@

$(VENV)/installed-test: pyproject.toml constraints.txt packaging/locks/test.txt | $(BIN)/python
	$(call LOCKED,test)
	$(PIP) -e '.[test]'
	@touch $@ $(VENV)/installed

$(VENV)/installed-docs: pyproject.toml constraints.txt | $(BIN)/python
	$(call LOCKED,docs)
	$(PIP) -e '.[docs]'
	@touch $@ $(VENV)/installed

$(VENV)/installed-ray: $(VENV)/installed-test
	$(call LOCKED,ray)
	$(PIP) -e '.[ray]'
	@touch $@
