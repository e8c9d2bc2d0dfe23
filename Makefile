# `make help` lists the targets. Settings, as in `make build PYTHON=python3.12`:
#   PYTHON    the Python that .venv is made from, 3.11 or newer (to change it, remove .venv)
#   TORCH     the torch to install, e.g. torch==2.14.1 (default: the one that PYTHON has, if it is
#             supported, else the version that the tests are run with)
#   MAX_JOBS  compilations at a time (default: one per core; with CUDA parts, fewer if memory is
#             short)
#   AXONN_CUDA  1: compile the CUDA parts or fail, 0: leave them out (default: compile them if
#             possible where a GPU works, else leave them out)
# The other variables that setup.py reads (CUDA_HOME, TORCH_CUDA_ARCH_LIST, ...) work, too. Export
# them: a later `make` without them builds again. With ccache installed, files that another checkout
# has compiled are not compiled again.

PYTHON ?= python3
MAX_JOBS ?= $(shell nproc)
VENV := .venv
CPP_BUILD := build/cpp
EMULATE_BUILD := build/emulate
CPP_SOURCES := $(shell find csrc cpp_tests -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

# Run as modules: tools inherited from the base Python have no script in .venv/bin.
RUFF := $(VENV)/bin/python -m ruff
MYPY := $(VENV)/bin/python -m mypy
CLANG_FORMAT := $(VENV)/bin/python -c 'import clang_format; clang_format.clang_format()'

export MAX_JOBS
export TORCH
# Distributions keep compiler wrappers that call ccache in these folders.
CCACHE_COMPILERS := $(firstword $(wildcard /usr/lib/ccache /usr/lib64/ccache))
ifneq ($(CCACHE_COMPILERS),)
  export CCACHE_BASEDIR := $(CURDIR)
  export CCACHE_NOHASHDIR := 1
  export CCACHE_COMPILERCHECK := content
  export CCACHE_PCH_EXTSUM := 1
  export CCACHE_SLOPPINESS := pch_defines,time_macros,include_file_mtime,include_file_ctime
  export PATH := $(CCACHE_COMPILERS):$(PATH)
endif
# Tests start many processes, which should reuse compiled Python files.
unexport PYTHONDONTWRITEBYTECODE
# ninja is installed from PyPI into .venv.
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help build wheel demo test test-cpp test-python test-long test-slow test-sanitizers gpu-check \
        cuda-check emulate emulate-slow emulate-torch triton-check matrix mutants docs \
        lint format clean \
        python environment lint-tools

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1@\2/p' $(MAKEFILE_LIST) | \
	  while IFS=@ read -r target text; do printf '  make %-17s %s\n' $$target "$$text"; done

build: python  ## set everything up: .venv, torch, dependencies, compiled extension
	@$(PYTHON) tools/bootstrap.py environment extension

wheel: build  ## build a wheel for .venv's torch, and try it in an environment without a compiler
	$(VENV)/bin/python tools/build_wheel.py

demo: build  ## train a small GPT on a 2x2 grid, then in one process, and compare the losses
	rm -rf runs/demo runs/demo-plain
	$(VENV)/bin/axonn-ext train --nproc 4 --config examples/demo.toml \
	  --grid x=2,y=2,z=1,data=1 --out runs/demo
	$(VENV)/bin/axonn-ext train --config examples/demo.toml \
	  --grid x=1 --model.implementation plain --out runs/demo-plain
	$(VENV)/bin/axonn-ext compare runs/demo runs/demo-plain

test: test-cpp test-python  ## run the C++ and the Python tests

test-cpp: environment  ## run the tests of the Torch-free core
	@$(call ctest,$(CPP_BUILD),,core_tests model_tests,)

test-python: build  ## run the Python tests, without the long and slow ones and those of Triton kernels
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile -m "not long and not slow and not gpu and not triton" --durations=15

test-long: build  ## run the Python tests that start commands and trainings of their own
	$(VENV)/bin/python -m pytest -n 2 --dist loadfile -m "long and not slow and not gpu and not triton" --durations=15

test-slow: build  ## run the slow Python tests
	@$(PYTHON) tools/bootstrap.py environment slow
	$(VENV)/bin/python -m pytest -m "slow and not gpu" --durations=15

gpu-check:  ## build, test, time and train on this machine's GPUs (BUDGET=seconds STAGE=... RESULTS=folder)
	@BUDGET='$(BUDGET)' STAGE='$(STAGE)' RESULTS='$(RESULTS)' ANYWAY='$(ANYWAY)' $(PYTHON) tools/gpu_check.py

docs: build  ## write the API and the tables of docs/ that come from the code
	$(VENV)/bin/python tools/docs_tables.py
	@cmake -S . -B $(CPP_BUILD) -G Ninja -DAXONN_WERROR=ON --log-level=WARNING >/dev/null
	@cmake --build $(CPP_BUILD) -j $(MAX_JOBS) --target kernel_times
	$(CPP_BUILD)/kernel_times docs/kernel_model.md

mutants: build  ## make mistakes in a copy, and see whether make test would notice (ONLY=text)
	$(VENV)/bin/python tools/mutants.py --only '$(ONLY)'

test-sanitizers: environment  ## run the core's tests under thread and address sanitizer
	@$(call ctest,$(CPP_BUILD)-thread,thread,core_tests,)
	@$(call ctest,$(CPP_BUILD)-address,address,core_tests model_tests,)

emulate: environment  ## run CUDA and Triton kernels instruction by instruction on the CPU; needs no GPU
	@$(call emulate,gpu_machine_tests gpu_machine_speed,OFF,-LE slow)
	@$(EMULATE_BUILD)/cpp_tests/gpu_machine/gpu_machine_speed

emulate-slow: environment  ## run them with more shapes, ranks and seeds
	@$(call emulate,gpu_machine_tests,ON,-L slow)

emulate-torch: environment  ## run tests marked gpu on PyTorch's CUDA build and a GPU in software
	@$(PYTHON) tools/bootstrap.py environment headers
	@$(PYTHON) tools/emulate_torch.py

cuda-check: python  ## build the CUDA code by the commands of docs/install.md, and check what needs no GPU
	@$(PYTHON) tools/cuda_check.py

triton-check: build  ## run the Triton kernels in the interpreter, compile them for sm_80, sm_90, gfx90a, gfx942
	$(VENV)/bin/python -m pytest -n 2 -m "triton and not gpu" --durations=5
	$(VENV)/bin/python tools/triton_check.py

matrix: python  ## build and test with several Pythons and torches (PYTHONS=... TORCHES="2.11 2.15")
	@$(PYTHON) tools/matrix.py

lint: lint-tools  ## check style and types
	$(RUFF) check .
	$(RUFF) format --check .
	@$(CLANG_FORMAT) --dry-run -Werror $(CPP_SOURCES)
	$(MYPY) axonn_ext

format: lint-tools  ## format Python and C++, and apply ruff's safe fixes
	$(RUFF) check --fix .
	$(RUFF) format .
	@$(CLANG_FORMAT) -i $(CPP_SOURCES)

clean:  ## remove what was built, not .venv (remove that by hand)
	rm -rf build dist *.egg-info axonn_ext/*.so .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

# --- What the targets share -----------------------------------------------------------------------

# $(call ctest,build folder,sanitizer,targets,settings of CMake,which tests)
define ctest
set -e; \
echo "tests: $(3)$(if $(2), under $(2) sanitizer): building in $(1)"; \
cmake -S . -B $(1) -G Ninja -DAXONN_WERROR=ON -DAXONN_SANITIZE=$(2) $(4) --log-level=WARNING >/dev/null; \
NINJA_STATUS='[%f/%t] ' cmake --build $(1) -j $(MAX_JOBS) --target $(3) -- --quiet; \
ctest --test-dir $(1)$(if $(4),/cpp_tests/gpu_machine) -j $(MAX_JOBS) $(5) --output-on-failure \
  --no-tests=error --progress
endef

# $(call emulate,targets,whether to build the kernels of slow tests,which tests)
define emulate
set -e; $(PYTHON) tools/bootstrap.py environment headers; \
$(call ctest,$(EMULATE_BUILD),,$(1),-DAXONN_GPU_MACHINE=ON -DAXONN_GPU_MACHINE_SLOW=$(2),$(3))
endef

python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'error: $(PYTHON) is missing or older than 3.11; name another: make PYTHON=python3.12 ...'; \
	  exit 1; }

environment: python
	@$(PYTHON) tools/bootstrap.py environment

lint-tools: python
	@$(PYTHON) tools/bootstrap.py environment lint
