# Every target makes .venv by itself; a second call installs nothing.
#
#   make book    run every chapter, build the site into _build/html
#   make lab     open the book in JupyterLab (CHAPTER=dqn: at that chapter)
#   make test    lint, types, tests, and every notebook from top to bottom
#   make bench   how fast the agents learn, beside Stable-Baselines3 and SBX (ten minutes)
#   make setup   only install

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SITE := _build/html
CHAPTER := index

# The kernel python3 is that of .venv, whatever else is registered on this machine.
export JUPYTER_PREFER_ENV_PATH := 1

.DEFAULT_GOAL := help
.PHONY: help setup book site lab test lint types unit notebooks bench ALWAYS

help:
	@sed -n 's/^#   //p' Makefile

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("rlbook needs Python 3.11 or newer: make PYTHON=python3.11" \
		if sys.version_info < (3, 11) else 0)'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || { echo "making .venv"; $(PYTHON) -m venv .venv; }
	@echo "installing (a few minutes the first time)"
	@$(INSTALL) -e ".[test]"
	@touch $@

setup: $(READY)

# Two chapters at a time, each on its own core, run into _build; `python -m rlbook.tangle run NAME`
# refreshes a committed notebook.
book: $(READY)
	@$(BIN)/python -m rlbook.tangle
	@$(MAKE) --no-print-directory -j 2 $$($(BIN)/python -m rlbook.tangle list | sed 's|^|_build/run/|')
	@cp -R book/_static _build/run/book/
	@RLBOOK_SOURCE=_build/run $(MAKE) --no-print-directory site

_build/run/book/%.ipynb: $(READY) ALWAYS
	@OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m rlbook.tangle run $* --out _build/run/book

# From the committed notebooks, unless RLBOOK_SOURCE names the folder of others.
site: export RLBOOK_SOURCE ?= .
site: $(READY)
	@$(BIN)/sphinx-build -W --keep-going -q -c book $(RLBOOK_SOURCE) $(SITE)
	@echo "The book is built: open $(SITE)/index.html"

# The server starts at the root, where jupytext finds its settings in pyproject.toml.
lab: $(READY)
	$(BIN)/jupyter lab --ServerApp.root_dir="$(CURDIR)" \
		--LabApp.default_url=/lab/tree/book/$(CHAPTER).ipynb $(LAB_FLAGS)

# The types are checked beside the tests, which leave part of a core idle.
test: lint
	@$(MAKE) --no-print-directory -j 2 types unit
	@$(MAKE) --no-print-directory notebooks

lint: $(READY)
	$(BIN)/ruff check

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	$(BIN)/python -m pytest -p no:nbmake -n 3 --dist loadfile --no-loadscope-reorder

# Two notebooks at a time, each on its own core.
notebooks: export OMP_NUM_THREADS := 1
notebooks: export OPENBLAS_NUM_THREADS := 1
notebooks: $(READY)
	$(BIN)/python -m pytest --nbmake --nbmake-timeout=600 -n 2 --dist worksteal $$($(BIN)/python -m rlbook.tangle list)

.venv/peers: $(READY)
	@$(INSTALL) -e ".[peers]"
	@touch $@

bench: .venv/peers
	$(BIN)/python bench/speed.py
