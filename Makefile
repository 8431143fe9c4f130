# Two commands matter: `make serve` sets up and runs the main job, `make test` sets up and passes the tests.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  ?= smollm2
ARGS   ?=
NATIVE := CMakeLists.txt $(shell find native -type f)

.PHONY: serve test check format models bench clean

serve: $(VENV)/.installed
	$(BIN)/toque serve $(MODEL) $(ARGS)

test: $(VENV)/.developed models check
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.developed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $(shell git ls-files 'native/*.cc' 'native/*.h')
	@$(BIN)/python scripts/line_budget.py

format: $(VENV)/.developed
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(shell git ls-files 'native/*.cc' 'native/*.h')

# The real models that tests and benchmarks use; each is checked against its sha256 and fetched once.
models: $(VENV)/.developed
	$(BIN)/python scripts/fetch_models.py .cache/models

bench: $(VENV)/.developed models
	$(BIN)/python benchmarks/compare.py $(ARGS)

clean:
	rm -rf $(VENV) build .cache

# Serving: `pip install .` and nothing else. Developing: an editable install with the tools of [dev].
$(VENV)/.installed: pyproject.toml $(NATIVE) $(shell find src -name '*.py')
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	test -e $(VENV)/.developed || $(BIN)/python -m pip install --quiet .
	touch $@

$(VENV)/.developed: pyproject.toml $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet 'scikit-build-core>=0.11' 'nanobind>=2.4' ninja
	$(BIN)/python -m pip install --quiet --no-build-isolation --editable '.[dev]'
	touch $@
