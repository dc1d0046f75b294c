# Everything runs in .venv, which the first target that needs it creates; no environment variable is required.
#   - If this machine's python3 has torch, Triton and a CUDA GPU, .venv uses those and downloads nothing.
#   - Otherwise .venv gets torch and Triton in the versions of triton_ep/supported.toml, and the CPU build of torch if
#     there is no NVIDIA driver and pip has no index of its own (tools/environment.py). TORCH names others:
#     make TORCH='torch==2.11.0 triton==3.6.0' demo
TORCH ?=
PYTHON ?= python3

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
TOOLS := $(VENV)/.tools
CPU := not gpu and not multi_gpu
# If the environment forbids Python to store bytecode (container images often do), every process compiles all of torch
# that it imports, for ten seconds, and tests start dozens of processes.
export PYTHONDONTWRITEBYTECODE :=
# Ranks are processes: with more than one compute thread each they only compete for the cores.
RUN := OMP_NUM_THREADS=1 $(BIN)/python
# Two test processes: with three on two cores the ranks of several tests compete, and the suite takes a tenth longer.
# Files in the order of tests/conftest.py. One process without pytest-xdist, which a lent environment may lack.
PARALLEL = $$($(BIN)/python -c 'import importlib.util as u; print("-n 2 --dist loadfile --no-loadscope-reorder" * bool(u.find_spec("xdist")))')
SOURCES := triton_ep kernels aot tests examples tools docs/pictures docs/site_hooks.py

.DEFAULT_GOAL := help
.PHONY: help demo doctor test peers chaos checks kernels-of-tests collected lint types docs pictures site site-packages site-browser site-test aot cubins nvshmem bench test-gpu api clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

demo: $(READY)  ## a small MoE layer on 4 ranks as 2 nodes x 2, compared with a dense computation
	@$(RUN) -m triton_ep.cli demo
	@echo "next: . $(BIN)/activate && triton-ep doctor"

doctor: $(READY)  ## what this machine has, what triton_ep will use, what to install
	$(RUN) -m triton_ep.cli doctor

test: $(TOOLS)  ## lint, types, then every test that needs no GPU; tests with ranks run again in chaos mode
	@$(MAKE) --no-print-directory -j 2 checks kernels-of-tests collected
	$(RUN) -m pytest tests --backend host -m "$(CPU)" --chaos-seeds 1 $(PARALLEL)

PEERS := build/peers
peers: $(TOOLS)  ## tests with the frameworks' own code, from their wheels
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(PEERS) megatron-core==0.16.1 torchtitan==0.3.0 \
	  spmd_types==0.2.3 tyro==1.0.17 docstring-parser==0.18.0 typeguard==4.6.0 sglang==0.5.23 vllm==0.33.0
	OMP_NUM_THREADS=1 PYTHONPATH=$(PEERS) $(BIN)/python -m pytest --backend host tests/integrations/test_megatron_core.py \
	  tests/integrations/test_torchtitan.py tests/integrations/test_torchtitan_deep_ep.py \
	  tests/integrations/test_torchtitan_hybrid_ep.py \
	  tests/integrations/test_sglang_deep_ep.py tests/integrations/test_vllm_own.py
	# All of vLLM, with the packages that it imports; those that would install another torch come without theirs.
	$(BIN)/python -m pip install -q --upgrade --target $(PEERS)-vllm -r tests/integrations/vllm_imports.txt
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(PEERS)-vllm compressed-tensors==0.17.0 xgrammar==0.2.8 \
	  apache-tvm-ffi==0.1.11
	OMP_NUM_THREADS=1 PYTHONPATH=$(PEERS):$(PEERS)-vllm $(BIN)/python -m pytest --backend host \
	  tests/integrations/test_vllm_backend.py
	# Apart from the others, which fail at its import: the wheel lacks the CUDA library, and is only read.
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(PEERS)-te transformer-engine==2.20.2
	OMP_NUM_THREADS=1 PYTHONPATH=$(PEERS)-te $(BIN)/python -m pytest tests/te/test_ep_signatures.py

chaos: $(TOOLS)  ## the tests with ranks in chaos mode, under three seeds
	$(RUN) -m pytest tests --backend host -m "$(CPU)" -k chaos --chaos-seeds 1,2,3 $(PARALLEL)

checks: $(TOOLS)
	@if [ "$$(cat $(READY))" = own ]; then $(MAKE) --no-print-directory lint types; \
	else echo "lint and types are left out: ruff and mypy are not installed beside this machine's torch"; fi

kernels-of-tests: $(TOOLS)  # kernels for the compile gate: every kernel, for every architecture, into build/
	$(RUN) -m tests.aot.library

collected: $(TOOLS)  # compile bytecode of the tests and their imports once, not in each process of pytest
	@mkdir -p build
	@$(RUN) -m pytest tests -m "$(CPU)" --collect-only -qqq > build/collected || { cat build/collected; false; }

lint: $(TOOLS)  ## ruff: rules and format
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)

# mypy finds triton_ep.kernels only after setuptools has applied the package map, hence the installed tree.
types: $(TOOLS)  ## mypy on the installed tree
	@rm -rf build/lib build/types
	@$(BIN)/python -m pip install -q --no-index --no-deps --no-build-isolation --target build/types .
	cd build/types && ../../$(BIN)/mypy --config-file ../../pyproject.toml -p triton_ep

docs: $(TOOLS)  ## run the code blocks of the pages and follow their links
	$(RUN) -m pytest tests/unit/test_docs.py

# A .venv that uses the machine's own torch has no pip: the site then needs mkdocs installed next to that torch.
site-packages: $(TOOLS)
	@$(BIN)/python -c 'import material, mkdocstrings_handlers.python' 2>/dev/null || $(BIN)/python -m pip install -q -e '.[docs]'

site: site-packages  ## the documentation as a site, in build/site; a warning is a failure
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict --quiet

site-browser: $(TOOLS)  # Chromium from the system's packages, and its driver
	@command -v chromedriver > /dev/null || \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver > /dev/null; }
	@$(BIN)/python -c 'import selenium' 2>/dev/null || $(BIN)/python -m pip install -q selenium

site-test: site site-browser  ## the site in headless Chromium: opened, searched, clicked
	$(RUN) -m pytest tests/unit/test_site_browser.py

pictures:  ## draw the pictures of the pages from the stored rows
	$(PYTHON) docs/pictures/draw.py

ARCH ?= sm_90

aot: $(TOOLS)  ## kernels ahead of time for ARCH=sm_90 (sm_90,sm_100, ...), no GPU needed, then verified
	$(RUN) -m triton_ep.aot build --arch $(ARCH)
	$(RUN) -m triton_ep.aot verify

CUBINS := sm_90,sm_100

cubins: $(TOOLS)  ## the wheel triton-ep-cubins in dist/: kernels for CUBINS=sm_90,sm_100, no GPU needed
	$(RUN) -m triton_ep.aot build --arch $(CUBINS) --out build/cubins --only
	$(RUN) -m triton_ep.aot wheel --out build/cubins --to dist

# Build kernels that cross nodes with another release of NVSHMEM than the tests use.
NVSHMEM ?= 3.8.0
NVSHMEM_BUILD := build/nvshmem-$(NVSHMEM)
TWO_NODES := {"hidden":7168,"topk":8,"num_experts":256,"max_tokens":4096,"ranks":[8,2],"num_sm":24}

nvshmem: $(TOOLS)  ## the bitcode and the kernels of two nodes with NVSHMEM=3.8.0 from PyPI, no GPU needed
	@test -d $(NVSHMEM_BUILD)/nvidia || \
	  $(BIN)/python -m pip install -q --no-deps --target $(NVSHMEM_BUILD) nvidia-nvshmem-cu13==$(NVSHMEM)
	PYTHONPATH=$(NVSHMEM_BUILD) $(RUN) -m pytest tests/unit/test_bitcode.py
	PYTHONPATH=$(NVSHMEM_BUILD) $(RUN) -m triton_ep.aot build --arch $(ARCH) --for-config '$(TWO_NODES)' --out $(NVSHMEM_BUILD)/library
	$(RUN) -m triton_ep.aot verify --out $(NVSHMEM_BUILD)/library

BENCH := $(RUN) -m triton_ep.cli bench
ROWS ?= build/bench.csv

bench: $(READY)  ## the standard table of benchmarks (GPUs): rows in ROWS=build/bench.csv, and a picture next to it
	$(BENCH) roundtrip --capacity static --enable-local-combine --num-sm 8,16,24,32,64 --payload bf16,mxfp8 --csv $(ROWS)
	$(BENCH) roundtrip --capacity static --enable-local-combine --num-sm 24 --tokens 16,128,1024 --csv $(ROWS)
	$(BENCH) roundtrip --capacity static --enable-local-combine --num-sm 24 --model qwen3-235b --csv $(ROWS)
	$(BENCH) roundtrip --capacity static --enable-local-combine --num-sm 24 --model mixtral --csv $(ROWS)
	$(BENCH) low-latency --payload bf16,mxfp8 --csv $(ROWS)
	$(BENCH) moe-layer --capacity exact,static --num-sm 24 --payload bf16,mxfp8 --backward --refresh-weights --csv $(ROWS)
	$(BENCH) barrier --csv $(ROWS)
	$(BENCH) quantise --csv $(ROWS)
	$(BENCH) plot $(ROWS) --out $(ROWS:.csv=.svg)

# Compiling takes most of the time, so JOBS processes that share the GPUs take less. Each needs a heap of its own.
JOBS ?= 1

test-gpu: $(TOOLS)  ## the tests that need GPUs, in JOBS processes (skips, by name, tests for more GPUs than there are)
	$(RUN) -m pytest tests --backend nvshmem -m "gpu or multi_gpu" $(if $(filter-out 1,$(JOBS)),-n $(JOBS) --dist worksteal)

# API changes since the last release that break callers: removed or changed names, arguments and defaults.
BASE ?= $(shell git describe --tags --abbrev=0 2>/dev/null || echo HEAD)

api: $(TOOLS)  ## public names that break since BASE (the last tag; without one, the last commit), by stability
	@$(BIN)/python tools/api.py $(BASE)

clean:  ## remove .venv and everything built
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml
	@$(PYTHON) tools/environment.py $(VENV) $(if $(TORCH),--torch '$(TORCH)')

$(TOOLS): $(READY)
	@$(PYTHON) tools/environment.py $(VENV) --tools
