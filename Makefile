# Each target does all the set-up it needs in a virtual environment of its own; running it again does only what is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Python compiles the modules that it imports; pip would compile all 25,000, on one core.
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
BASE_IMAGE := python:3.11-slim-bookworm
INPUTS := $(wildcard packages/*/pyproject.toml) requirements-dev.txt constraints.txt

.PHONY: help demo test test-full test-deploy test-faults check check-fast docs mutants lock sbom image clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 12

demo: $(VENV)/.run-ready ## which method serves which clients: three federations of digits, one picture
	$(BIN)/python examples/demo.py runs/demo

test: $(VENV)/.dev-ready ## format, lint, types, import rules and tests
	PYTHON=$(BIN)/python scripts/check

test-full: $(VENV)/.dev-ready ## the same with the slow tests
	PYTHON=$(BIN)/python scripts/check --full

test-deploy: $(VENV)/.dev-ready ## a real server and real sites on loopback, over TLS; needs nginx: apt-get install nginx
	$(BIN)/python -m pytest -q -m deploy -n 2 --dist loadfile packages/fedloom-sites/tests/deploy

test-faults: $(VENV)/.dev-ready ## every fault at every operation of small runs, an hour at most; run it again to go on
	$(BIN)/python -m pytest -q -m faults tests/faults

check: test

check-fast: $(VENV)/.dev-ready ## while you work: no tests but the laws of every method and the quickest others
	PYTHON=$(BIN)/python scripts/check --fast

docs: $(VENV)/.dev-ready ## the documentation, in build/site
	$(BIN)/mkdocs build --strict

mutants: $(VENV)/.dev-ready ## do the tests notice wrong operators, indices and constants?
	$(BIN)/python scripts/mutants

lock: $(VENV)/.dev-ready ## what a machine of a deployment installs, with versions and hashes
	$(BIN)/uv build --quiet --wheel packages/fedloom --out-dir build/lock
	echo hatchling | $(BIN)/uv pip compile packages/fedloom/pyproject.toml packages/fedloom-sites/pyproject.toml - --extra deploy --constraint constraints.txt --generate-hashes \
	  --find-links build/lock --no-emit-package fedloom --python-version 3.11 --universal --no-annotate --custom-compile-command 'make lock' -q -o requirements-deploy.txt

sbom: $(VENV)/.dev-ready ## what a machine of a deployment installs, with licenses, as a CycloneDX bill of materials: build/sbom.json
	$(PIP) cyclonedx-bom
	mkdir -p build
	$(BIN)/cyclonedx-py requirements requirements-deploy.txt --output-reproducible -o build/sbom.json
	$(BIN)/python scripts/sbom.py build/sbom.json

image: base-image.txt ## the container image of a deployment's machines: needs docker
	docker build --build-arg BASE="$$(cat base-image.txt)" --tag fedloom:$$(sed -n 's/^__version__ = "\(.*\)"/\1/p' packages/fedloom/src/fedloom/version.py) .

# The digest of the base image, from the registry. Later builds use the recorded one; remove the file to take a newer one.
base-image.txt:
	docker pull --quiet $(BASE_IMAGE)
	digest=$$(docker image inspect --format '{{index .RepoDigests 0}}' $(BASE_IMAGE) | grep -oE 'sha256:[0-9a-f]{64}$$') \
	  && echo "$(BASE_IMAGE)@$$digest" > $@

clean: ## remove the virtual environment and the caches
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fedloom needs Python 3.11 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# torch goes first and alone, so that nothing else can choose its build.
$(VENV)/.torch-ready: constraints.txt | $(BIN)/python
	$(PIP) torch
	@touch $@

$(VENV)/.run-ready: $(INPUTS) $(VENV)/.torch-ready
	$(PIP) --editable 'packages/fedloom[charts]'
	@touch $@

# byzfl and lifelines without what they declare: byzfl's rules need torch and SciPy only, and torchvision has no build
# for every torch; lifelines asks for pandas below 3, and what the tests use of it works with pandas 3.
$(VENV)/.dev-ready: $(INPUTS) $(VENV)/.run-ready
	$(PIP) --requirement requirements-dev.txt
	$(PIP) --no-deps byzfl==0.0.11 lifelines==0.30.3
	@touch $@
