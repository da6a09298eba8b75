# `make demo` and `make test` each work as the first command in a fresh clone with Python 3.11, pip and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help setup demo test check bench dashboard figures browser clean

help:
	@echo "make demo       set up, then plan on this machine, ending in a report to open"
	@echo "make test       set up, then every test"
	@echo "make check      formatting, lint and types"
	@echo "make bench      speed, side by side with peers"
	@echo "make figures    draw the pictures of the README again"
	@echo "make dashboard  (not built yet)"
	@echo "make clean      remove the environment and everything made"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "gpipe-planner needs Python 3.11 or newer: make PYTHON=python3.11 ..."; exit 1; }
	@echo "setting up $(VENV) (once, a minute or two)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[report,exec,dev]'
	@touch $@

demo: setup
	@$(BIN)/gpipe demo

test: setup browser
	$(BIN)/pytest

check: setup
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

bench: setup
	$(BIN)/python benchmarks/simulator.py

figures: setup browser
	$(BIN)/python docs/figures.py

dashboard:
	@echo "the dashboard is not built yet; 'make demo' writes a report to open in a browser"; exit 1

# Tests of the report drive a real browser. Where it can be installed without asking, it is; elsewhere they are skipped.
browser:
	@command -v chromium >/dev/null || { command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] && \
		echo "installing chromium" && apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } || \
		echo "no chromium: tests that need a browser will be skipped"

clean:
	rm -rf $(VENV) build dist runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
