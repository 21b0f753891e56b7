# From a fresh clone, with Python and make: `make demo`. Each target makes .venv on first use.
#
#   make demo    complete a Python file with the built-in model, and print how fast it went
#   make test    the tests that need no GPU, in a few minutes: fewer cases, and no long ones
#   make test-all  all of them
#   make test-rest  those that make test leaves out
#   make test-processors  those that compare a kernel's bits, as numpy computes on other processors
#   make fuzz    random cases against an oracle, until something is found: ARGS='--cases 500', tests/fuzz/README.md
#   make check   lint, format, types
#   make docs    the documentation site, into build/docs; fails on links that lead nowhere
#   make audit   known vulnerabilities of what Stride runs on
#   make bench   measure the drafters against plain decoding
#   make setup   only install, with the development tools and the pre-commit hooks
#   make install  only install, with what every target needs
#
# PYTHON    the interpreter that .venv is made with (3.10 to 3.13)
# PIP_ARGS  passed to pip: PIP_ARGS='--extra-index-url https://download.pytorch.org/whl/cpu' gets a torch without
#           CUDA, a tenth of the size
# EXTRAS    extras that check and test install: EXTRAS=dev,harness adds lm-evaluation-harness and two routers, for their tests (810 MB);
#           clients adds agents' libraries (75 MB)
# JOBS      test processes; each computes with one thread, so that they do not fight for the cores, and takes neighbouring
#           tests, which share models and reference outputs, until it has none left and takes another's
# CORES     what test-processors has OpenBLAS take the processor for, one process for each
# REPO_URL  address of the repository, for links from the documentation site to its files
# ARGS      passed to the command behind demo, test, test-all, test-rest, fuzz, docs and bench

PYTHON   ?= python3
VENV     ?= .venv
PIP_ARGS ?=
EXTRAS   ?= dev
JOBS     ?= 2
ARGS     ?=
CORES    ?= Haswell SkylakeX

BIN      := $(VENV)/bin
PIP      := $(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt
USE      := $(VENV)/.installed
DEVELOP  := $(VENV)/.installed-$(EXTRAS)
SITE     := $(VENV)/.installed-site

PYTEST   := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TRITON_INTERPRET=1 $(BIN)/python -m pytest -q

.PHONY: demo test test-all test-rest test-processors fuzz check docs audit format bench setup install clean
.DEFAULT_GOAL := demo

demo: $(USE)
	$(BIN)/stride generate --prompt-file examples/prompt.txt --max-tokens 120 --temperature 0 --drafter auto $(ARGS)

test: WHICH := --quick
test-rest: WHICH := --rest
test test-all test-rest: $(DEVELOP)
	$(PYTEST) -n $(JOBS) --dist worksteal $(WHICH) $(ARGS)

# The interpreter computes with numpy, whose OpenBLAS adds in another order on each of these; on AMD's Zen it takes
# Haswell's code. A process for each collects the tests once; a failure's report has its name.
test-processors: $(DEVELOP)
	$(PYTEST) --dist each \
	  $(foreach core,$(CORES),--tx popen//id=$(core)//env:OPENBLAS_CORETYPE=$(core)) \
	  -m interpreted -k "interpreter or invarian or bit" tests/unit/kernels

fuzz: $(DEVELOP)
	OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m fuzz $(ARGS)

check: $(DEVELOP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What the notice that is switched off says, decision 15 says too.
docs: $(SITE)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict $(ARGS)

audit: $(DEVELOP)
	$(BIN)/python tools/audit.py

format: $(DEVELOP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(USE)
	$(BIN)/stride bench latency $(ARGS)

setup: $(DEVELOP)
	@if [ -d .git ]; then $(BIN)/pre-commit install; fi

install: $(DEVELOP) $(SITE)

clean:
	rm -rf $(VENV)

# The stamps: installed once, and again when what is to be installed changes.
$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; v = sys.version_info[:2]; (3, 10) <= v <= (3, 13) or sys.exit(f"Python {v[0]}.{v[1]} will not do: make PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)

$(USE): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing Stride into $(VENV) (once; PyTorch is large)"
	$(PIP) -e .
	$(BIN)/python -c 'from stridelm import LLM; LLM()'  # compiles the CPU's kernels
	@touch $@

$(DEVELOP): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing Stride and its development tools into $(VENV) (once; PyTorch is large)"
	$(PIP) -e '.[$(EXTRAS)]'
	@touch $@ $(USE)

$(SITE): pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing what builds the documentation into $(VENV) (once)"
	$(PIP) -e '.[docs]'
	@touch $@ $(USE)
