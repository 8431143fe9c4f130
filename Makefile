# Two commands matter: `make serve` runs the main job, `make test` sets up and passes the tests.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
MODEL  ?= smollm2

.PHONY: serve test check models bench clean

$(VENV)/.installed: pyproject.toml CMakeLists.txt $(shell find native -type f)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet .
	touch $@
