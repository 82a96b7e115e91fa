# SPDX-FileCopyrightText: The GPUMonitor authors
# SPDX-License-Identifier: Apache-2.0
# Everything a person or CI runs. `make` alone prints what there is.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.ready
FAKENVML := tests/fakenvml/build/libnvidia-ml.so.1
TOOLS := .cache/tools
PROMETHEUS := $(TOOLS)/promtool $(TOOLS)/prometheus
BROWSER := $(TOOLS)/.chromium

# `devcluster` builds and starts the local cluster. `existing` uses the cluster of the current kubeconfig, and then
# IMAGE names a repository prefix that holds our images. A KUBECONFIG that happens to be set is never enough.
CLUSTER ?= devcluster
IMAGE ?=
TESTS ?=
export CLUSTER IMAGE

# Tests start some hundred interpreters: compiling everything anew in each of them would cost a third of the time.
unexport PYTHONDONTWRITEBYTECODE

##@ Everyday
.PHONY: help
help: ## Show this list
	@awk 'BEGIN {FS = ":.*## "} /^##@/ {printf "\n%s\n", substr($$0, 5)} /^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(READY) $(FAKENVML) ## Local cluster, chart, verl-shaped jobs on simulated GPUs, `kubectl get gpumonitors`
	@$(PYTHON) -m examples.demo up

.PHONY: demo-down
demo-down: $(READY) ## Remove what the demo made; the build cache stays (`make purge` removes that too)
	@$(PYTHON) -m examples.demo down

.PHONY: test
test: export HYPOTHESIS_PROFILE := thorough
test: lint unit cluster-test ## Every test: static checks, unit, contract, and behaviour on the real cluster

.PHONY: check
check: $(READY) ## ruff, mypy, import-linter, unit and contract tests, but for the slow ones: under two minutes
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint unit TESTS='-m "not slow"'

.PHONY: bench
bench: $(READY) $(FAKENVML) ## Print the figures: sidecar, webhook, ingest, controller
	@$(PYTHON) -m tests.bench

##@ Single steps
.PHONY: setup
setup: $(READY) ## Make .venv with all that development needs

# nice: beside it run tests of processes that must answer in time.
.PHONY: lint
lint: $(READY) ## Format check, lint, types, layers
	@$(VENV)/bin/ruff format --check . && $(VENV)/bin/ruff check .
	@nice $(VENV)/bin/mypy
	@nice $(VENV)/bin/mypy --python-version 3.10 --cache-dir .mypy_cache/3.10 library
	@$(VENV)/bin/lint-imports --no-cache | grep -v '^[╔╚ ║]'

.PHONY: format
format: $(READY) ## Format and fix what can be fixed
	@$(VENV)/bin/ruff format . && $(VENV)/bin/ruff check --fix .

.PHONY: unit
unit: $(READY) $(FAKENVML) $(PROMETHEUS) $(BROWSER) ## Unit and contract tests; TESTS holds options of pytest
	@PATH="$(CURDIR)/$(TOOLS):$$PATH" $(PYTHON) -m pytest -n 4 --dist worksteal $(TESTS) tests/unit tests/contract

.PHONY: explore
explore: $(READY) ## Property tests with many examples, other ones each time (half an hour)
	@HYPOTHESIS_PROFILE=explore $(PYTHON) -m pytest -n 2 --dist worksteal -m hypothesis $(TESTS) tests/unit

.PHONY: cluster-test
cluster-test: cluster-up ## Behaviour on the real cluster
	@$(PYTHON) -m pytest tests/cluster

.PHONY: cluster-up
cluster-up: $(READY) $(FAKENVML) ## Build and start the local cluster, build and load our images
	@if [ "$(CLUSTER)" = devcluster ]; then $(PYTHON) -m devcluster up; fi

.PHONY: cluster-down
cluster-down: $(READY) ## Stop the local cluster and clean up after it
	@$(PYTHON) -m devcluster down

.PHONY: purge
purge: $(READY) ## Stop the local cluster and remove its build cache
	@$(PYTHON) -m devcluster down --purge

.PHONY: lock
lock: $(READY) ## Renew the lock files: hashes, no index addresses
	@for target in sidecar: operator:--extra=operator dev:--extra=dev; do \
	  $(VENV)/bin/uv pip compile pyproject.toml $${target#*:} --python-version 3.11 --universal --upgrade --quiet \
	    --generate-hashes --no-emit-index-url --no-annotate --no-header --output-file requirements/$${target%%:*}.txt; \
	done

# What a bare Debian lacks is installed when root may; elsewhere the message says what to install.
$(READY): requirements/dev.txt pyproject.toml
	@missing=; \
	python3 -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || missing="$$missing python3"; \
	python3 -c 'import venv, ensurepip' 2>/dev/null || missing="$$missing python3-venv"; \
	command -v gcc >/dev/null || missing="$$missing gcc libc6-dev"; \
	if [ -n "$$missing" ]; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "Installing$$missing"; apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$missing >/dev/null; \
	  else echo "Please install:$$missing (Debian's names; Python must be 3.11 or newer)" >&2; exit 1; fi; \
	fi
	@echo "Making $(VENV) (about a minute)"
	@python3 -m venv $(VENV)
	@$(VENV)/bin/pip install --quiet --disable-pip-version-check --require-hashes --no-deps -r requirements/dev.txt
	@$(VENV)/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# Out of Debian's package, without its service. Elsewhere those on PATH serve.
$(PROMETHEUS): | $(READY)
	@mkdir -p $(TOOLS)
	@if command -v $(@F) >/dev/null; then ln -sf "$$(command -v $(@F))" $@; \
	elif command -v apt-get >/dev/null; then \
	  folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && chmod 755 "$$folder" && cd "$$folder" && \
	  { apt-get download -qq prometheus 2>/dev/null || { apt-get update -qq && apt-get download -qq prometheus; }; } && \
	  dpkg-deb -x prometheus_*.deb . && install usr/bin/$(@F) "$(CURDIR)/$@"; \
	else echo "Please install $(@F) (it comes with Prometheus)" >&2; exit 1; fi

# Reports are pages: the tests look at them in a real browser.
$(BROWSER): | $(READY)
	@mkdir -p $(TOOLS)
	@if ! command -v chromium >/dev/null && ! command -v google-chrome >/dev/null; then \
	  if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	    echo "Installing chromium (about a minute)"; apt-get update -qq && \
	    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core >/dev/null; \
	  else echo "Please install chromium: the tests of pages need it" >&2; exit 1; fi; \
	fi
	@touch $@

$(FAKENVML): $(wildcard tests/fakenvml/*.c tests/fakenvml/*.h tests/fakenvml/*.txt tests/fakenvml/Makefile)
	@$(MAKE) --no-print-directory -s -C tests/fakenvml
