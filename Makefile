# Everything a fresh machine needs: `make test`, `make demo`. The first call sets up .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: test lint types check demo tables clean

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

test: lint types
	$(BIN)/python -m pytest -n 2 --dist worksteal

demo: $(READY)
	$(BIN)/outcore demo

tables: $(READY)
	$(BIN)/python -m benchmarks.tables

clean:
	rm -rf $(VENV) build *.egg-info
