# Every target makes .venv by itself; a second call installs nothing.
#
#   make book    run every chapter, build the site into _build/html
#   make lab     open the book in JupyterLab
#   make test    lint, types, tests, and every notebook from top to bottom
#   make bench   steps per second, beside Stable-Baselines3
#   make setup   only install

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
SITE := _build/html

.DEFAULT_GOAL := help
.PHONY: help setup book site lab test lint types unit notebooks bench

help:
	@sed -n 's/^#   //p' Makefile

$(READY): pyproject.toml constraints.txt
	@test -x $(BIN)/python || { echo "making .venv"; $(PYTHON) -m venv .venv; }
	@echo "installing (a few minutes the first time)"
	@$(INSTALL) -e ".[test]"
	@touch $@

setup: $(READY)

book: $(READY)
	@$(BIN)/python -m rlbook.tangle run
	@$(MAKE) --no-print-directory site

site: $(READY)
	@$(BIN)/sphinx-build -W --keep-going -q -c book . $(SITE)
	@echo "The book is built: open $(SITE)/index.html"

lab: $(READY)
	$(BIN)/jupyter lab book

test: lint types unit notebooks

lint: $(READY)
	$(BIN)/ruff check

types: $(READY)
	$(BIN)/mypy

unit: $(READY)
	$(BIN)/python -m pytest -n 2

# Chapters run in the order of the book, with the interpreter of .venv whatever else is registered.
notebooks: $(READY)
	JUPYTER_PREFER_ENV_PATH=1 $(BIN)/python -m pytest --nbmake -n 2 $$($(BIN)/python -m rlbook.tangle list)

.venv/peers: $(READY)
	@$(INSTALL) -e ".[peers]"
	@touch $@

bench: .venv/peers
	$(BIN)/python bench/dqn.py
