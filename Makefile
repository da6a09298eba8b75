# `make demo` and `make test` each work as the first command in a fresh clone with Python 3.11, pip and make.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: help setup demo test check gpu bench chaos peers targets huggingface fuzz dashboard docs figures browser clean

help:
	@echo "make demo       set up, then plan on this machine, ending in a report to open"
	@echo "make test       set up, then every test, on two cores"
	@echo "make check      formatting, lint and types"
	@echo "make gpu        exactness, profile, run, compare and a killed rank on this machine's GPUs, ending in one report"
	@echo "make bench      speed, side by side with peers, and accuracy; an hour, with nothing else running"
	@echo "make chaos      faults at random moments of runs and profiles, ending in a table (SECONDS=300)"
	@echo "make targets    what is exported, taken by the tools that it is for, in an environment of their own"
	@echo "make huggingface  models of Hugging Face's transformers, in an environment of their own"
	@echo "make fuzz       search for files that break the readers, a minute each (SECONDS_EACH=600 for longer)"
	@echo "make docs       write the reference in docs/reference from the code again"
	@echo "make figures    draw the pictures of the README and the docs again"
	@echo "make dashboard  explore plans in a browser"
	@echo "make clean      remove the environment and everything made"

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "gpipe-planner needs Python 3.11 or newer: make PYTHON=python3.11 ..."; exit 1; }
	@echo "setting up $(VENV) (once, a minute or two)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[report,dashboard,exec,dev]'
	@touch $@

demo: setup
	@$(BIN)/gpipe demo

# Many tests start real processes or a browser, two files at a time. What failed there is shown, and tried once more by itself:
# it passes only where nothing but the other core's work was in its way.
test: setup browser
	@$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder || { [ $$? = 1 ] && \
		echo "== once more, by themselves: the tests that failed" && $(BIN)/pytest --last-failed; }

check: setup
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

gpu: setup
	$(BIN)/python benchmarks/gpu.py

BENCHMARKS := simulator scale planner rivals cuts execution accuracy regret cores network dashboard
ROWS := build/bench

# Each benchmark tells its own story; the table at the end has the headlines of all, from this one run.
bench: setup peers
	@rm -rf $(ROWS); for name in $(BENCHMARKS); do echo "== $$name"; \
		$(BIN)/python benchmarks/$$name.py --rows $(ROWS)/$$name.json || failed="$$failed $$name"; done; \
		echo "== all of it"; $(BIN)/python benchmarks/table.py $(ROWS); \
		[ -z "$$failed" ] || { echo "a goal was missed in:$$failed"; exit 1; }

# Not so much speed as manners: what is told of a fault, how soon, who is left behind and what is lost.
SECONDS ?= 300
chaos: setup
	$(BIN)/python benchmarks/chaos.py --seconds $(SECONDS)

# Engines and models to measure beside ours. Whatever they say they need, they get the torch that is there. DeepSpeed comes
# as source, and looks for that torch while it is built.
peers: $(VENV)/.peers

PEER := $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --constraint constraints.txt

$(VENV)/.peers: $(VENV)/.ready Makefile
	@{ $(PEER) torchgpipe fairscale llm-analysis fire termcolor && touch $@; } || \
		echo "torchgpipe, fairscale and llm-analysis cannot be installed: the benchmarks will leave them out"
	@{ $(PEER) wheel einops hjson msgpack ninja psutil py-cpuinfo tqdm && DS_BUILD_OPS=0 $(PEER) --no-build-isolation deepspeed; } || \
		echo "DeepSpeed cannot be installed: the benchmarks will leave it out"

# The tools that plans are exported for, in an environment of its own: they take our exports as far as their code goes without
# a GPU. They get the torch that is there, and nothing else of what they say they need but what those parts import.
targets: setup .targets/.ready
	.targets/bin/python -m pytest -W ignore tests/test_targets.py

.targets/.ready: pyproject.toml constraints.txt Makefile
	@echo "setting up .targets with torchtitan, Megatron-core and DeepSpeed"
	@$(PYTHON) -m venv .targets
	@$(BIN)/python -c "import os, sysconfig; print(sysconfig.get_path('purelib'), os.getcwd(), sep='\n')" > \
		"$$(.targets/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/planner.pth"
	@.targets/bin/pip install --quiet --disable-pip-version-check --no-deps torchtitan==0.3.0 megatron-core==0.16.1 \
		tyro docstring_parser typeguard tokenizers einops torchdata torch_checkpointing spmd_types==0.2.3 safetensors
	@.targets/bin/pip install --quiet --disable-pip-version-check --no-deps wheel hjson msgpack ninja psutil py-cpuinfo tqdm
	@DS_BUILD_OPS=0 .targets/bin/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation deepspeed==0.19.8
	@touch $@

# Hugging Face's transformers, in an environment of its own too: 200 MB that nothing else needs.
huggingface: setup .huggingface/.ready
	.huggingface/bin/python -m pytest -W ignore tests/test_huggingface.py

.huggingface/.ready: pyproject.toml Makefile
	@echo "setting up .huggingface with transformers"
	@$(PYTHON) -m venv .huggingface
	@$(BIN)/python -c "import os, sysconfig; print(sysconfig.get_path('purelib'), os.getcwd(), sep='\n')" > \
		"$$(.huggingface/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/planner.pth"
	@.huggingface/bin/pip install --quiet --disable-pip-version-check 'transformers>=5'
	@touch $@

# Coverage-guided fuzzing of the readers, in an environment of its own: atheris is no dependency of the project.
SECONDS_EACH ?= 60
fuzz: setup .fuzz/.ready
	GPIPE_NEW_EXAMPLES=1 $(BIN)/pytest -m search tests
	GPIPE_NEW_EXAMPLES=1 $(BIN)/pytest $$(grep -l hypothesis tests/test_*.py)
	@for reader in scenario plan profile pipedream run trace; do echo "== $$reader, $(SECONDS_EACH) s"; \
		.fuzz/bin/python tests/fuzz/guided.py $$reader --seconds $(SECONDS_EACH) || exit 1; done

.fuzz/.ready: pyproject.toml
	@echo "setting up .fuzz with atheris (Linux, CPython 3.11 to 3.13)"
	@$(PYTHON) -m venv .fuzz
	@.fuzz/bin/pip install --quiet --disable-pip-version-check --editable . atheris
	@touch $@

docs: setup
	$(BIN)/python docs/reference.py

figures: setup browser
	$(BIN)/python docs/figures.py

dashboard: setup
	@$(BIN)/gpipe dashboard

# Tests of the report drive a real browser. Where it can be installed without asking, it is; elsewhere they are skipped.
browser:
	@command -v chromium >/dev/null || { command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] && \
		echo "installing chromium" && apt-get update -qq && apt-get install -y -qq chromium >/dev/null; } || \
		echo "no chromium: tests that need a browser will be skipped"

clean:
	rm -rf $(VENV) .fuzz .targets .huggingface build dist runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
