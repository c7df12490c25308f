# Two commands do everything on a machine with Python 3.11, pip and make: `make demo` and `make test`.
# The first installs what the library needs, within a minute or two; the others add what tests, docs and clients need.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO_READY := $(VENV)/.demo-ready
READY := $(VENV)/.ready
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
# Ranks and scripts start many Pythons: what one has compiled the others read, and what none imports nobody compiles.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test lint bench coverage-ops docs pictures clean
.DEFAULT_GOAL := help

help:
	@echo "make demo   train a model in pieces on 4 local ranks, go on with 3, finish with 2, beside its twin"
	@echo "make test   ruff, mypy --strict, import-linter, then pytest on real gloo ranks"
	@echo "make lint   the first three of those"
	@echo "make bench  measure against torch.distributed._shard, DTensor and plain tensors"
	@echo "make coverage-ops  try every op, module and optimizer of torch's own databases, here and on DTensor"
	@echo "make docs   build the site of the documentation, in docs/_build/html; warnings are errors"
	@echo "make pictures  draw the pictures of the documentation, in docs/pictures, and its sample report"
	@echo "make clean  remove the virtual environment and every cache"

$(DEMO_READY): pyproject.toml constraints.txt
	@echo "installing shardwise and torch into $(VENV), once; that takes about a minute ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) --editable .
	@touch $@

$(READY): pyproject.toml constraints.txt
	@echo "installing what tests, docs and clients need into $(VENV), once; that takes some minutes ..."
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) --editable '.[cli,clients,dev,docs,storage]'
	@touch $(DEMO_READY) $@

demo: $(DEMO_READY)
	@$(BIN)/python examples/train_anywhere.py

lint: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy --num-workers auto || { test $$? = 2 && echo "mypy again, without workers: they start within 3 s or not at all" && $(BIN)/mypy; }
	@$(BIN)/lint-imports --no-cache

test: lint
	@$(BIN)/python -m pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

bench: $(READY)
	@$(BIN)/python -m benchmarks

coverage-ops: $(READY)
	@$(BIN)/python -m benchmarks.coverage

docs: $(READY)
	@$(BIN)/python -m sphinx -q -W --keep-going -d docs/_build/doctrees docs docs/_build/html
	@echo "docs/_build/html/index.html"

pictures: $(READY)
	@$(BIN)/python docs/pictures/make.py
	@$(BIN)/python docs/pictures/sample_report.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist docs/_build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
