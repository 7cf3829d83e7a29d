# make demo     run the quickstart notebook in a real kernel, write build/demo/quickstart.html
# make test     all tests; those in a browser are skipped where chromium is missing
# make frontends  the tests in JupyterLab and Notebook 7 alone; PICTURES=docs/img takes the pictures
# make gpu-sim  the GPU suite on simulated cards (tests/simulated_gpu), results in build/gpu-sim; with OUT= in docs/
# make check    lint, types, layers
# make bench    the figures of docs/measured/benchmarks.md
# make torture  how notebooks leak, on every Python found here, with and without the extension; writes docs/leaks.md
# make corners  a smoke test on the oldest and the newest of IPython and Python that are found here
# make matrix   the same on every IPython and Python that is supported and found here
#
# JOBS is how many processes run the tests. PYTHON picks the interpreter. CONSTRAINTS picks the versions: the default
# pins torch, so that no open range brings gigabytes of CUDA packages; an empty file takes the newest of everything.

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV ?= .venv
BIN := $(VENV)/bin

JOBS ?= 2
PICTURES ?=
OUT ?= build/gpu-sim

# The tests start hundreds of kernels; where this is set, each would compile the package anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test frontends gpu-sim check bench torture corners matrix clean

INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off -c $(CONSTRAINTS)

# By itself: somebody who tries the demo need not wait for what judges the code.
$(VENV)/.demo: setup.cfg pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) -e '.[demo]'
	touch $@

$(VENV)/.installed: $(VENV)/.demo
	$(INSTALL) --quiet -e '.[demo,test,frontends,dev]'
	touch $@

demo: $(VENV)/.demo
	$(BIN)/python examples/run_demo.py build/demo

# What brings torch or a trainer into its process runs apart: each look at the heap takes longer then.
test: $(VENV)/.installed
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal --ignore tests/torch_cpu --ignore tests/integrations
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests/torch_cpu
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests/integrations

frontends: $(VENV)/.installed
	IPYGPUMEM_FRONTENDS=required IPYGPUMEM_PICTURES='$(PICTURES)' $(BIN)/python -m pytest tests/frontends -m frontends

build/simgpu/.built: $(wildcard tests/simulated_gpu/*.py tests/simulated_gpu/*.[ch]) tests/gpu/wheels.txt
	$(PYTHON) tests/simulated_gpu/build.py build/simgpu
	touch $@

gpu-sim: build/simgpu/.built
	PYTHON=build/simgpu/python OUT_DIR='$(OUT)' SUITE_SECONDS=2400 QUICKSTART_SECONDS=300 tests/gpu/run.sh

check: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The peer without its own requirements, which bring the deprecated package pynvml, with which torch warns.
bench: $(VENV)/.installed
	$(INSTALL) --quiet --no-deps 'ipyexperiments==0.1.29'
	$(BIN)/python -m benchmarks

torture: $(VENV)/.installed
	$(BIN)/python -m tests.torture

corners:
	$(PYTHON) tests/matrix/run.py --corners

matrix:
	$(PYTHON) tests/matrix/run.py

clean:
	rm -rf build $(VENV)
