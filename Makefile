# `make demo` and `make test` do all the set-up: a virtual environment in .venv, made with python3.
PYTHON ?= python3
PYTEST_ARGS ?= -n 2
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: help demo test lint

help:
	@echo "make demo   solve sample problems with the bundled model"
	@echo "make test   run the tests; PYTEST_ARGS are the arguments of pytest [$(PYTEST_ARGS)]"
	@echo "make lint   check the style of the code"

demo: $(INSTALLED)
	$(BIN)/python -m sparsespec_jax.generate

test: $(INSTALLED)
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

# Once, and again when pyproject.toml has changed.
$(INSTALLED): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or later is needed: make PYTHON=..." if sys.version_info < (3, 11) else 0)'
	@echo "installing into .venv; this takes a minute or two"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test]"
	@touch $@
