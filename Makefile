# Everything a fresh machine needs: `make test`, `make demo`. The first call sets up .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: test lint types check coverage oldest demo tables docs package clean

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

check: lint types  # under a minute: what needs no training step
	$(BIN)/python -m pytest -q -n 2 tests/pure

test: lint types
	$(BIN)/python -m pytest -n 2 --dist worksteal

coverage: $(READY)  # the tests again, with the lines they reach: half as long again (sysmon helps from Python 3.12 on)
	COVERAGE_CORE=$$($(BIN)/python -c 'import sys; print("sysmon" if sys.version_info >= (3, 12) else "ctrace")') \
	$(BIN)/python -m pytest -n 2 --dist worksteal --cov=outcore --cov-report=term:skip-covered

oldest: $(READY)  # the tests with the oldest PyTorch we support, in an environment of its own (several GB)
	$(PYTHON) -m venv .venv-oldest
	grep -v '^torch==' constraints.txt > .venv-oldest/constraints.txt
	.venv-oldest/bin/pip install --quiet --disable-pip-version-check torch==2.11.0
	.venv-oldest/bin/pip install --quiet --disable-pip-version-check -c .venv-oldest/constraints.txt -e '.[dev]'
	.venv-oldest/bin/python -m pytest -n 2 --dist worksteal tests/pure tests/cpu

demo: $(READY)
	$(BIN)/outcore demo

tables: $(READY)
	$(BIN)/python -m benchmarks.tables

docs: $(READY)  # the site, from docs/, README.md, examples/ and docstrings: build/site/index.html; warnings are errors
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/mkdocs build --strict --quiet

package: $(READY)  # sdist, a wheel from it; the wheel is installed into a fresh environment, where the demo runs
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt build
	rm -rf dist build/package
	$(BIN)/python -m build --outdir dist .
	$(PYTHON) -m venv build/package
	build/package/bin/pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd build/package && bin/outcore --version && bin/outcore demo
	cp tests/typed_user.py build/package  # away from the source: what is installed must bring its types
	cd build/package && $(abspath $(BIN))/mypy --strict --python-executable bin/python typed_user.py
	cd build/package && bin/python -c "from outcore.machines import machine_from; machine_from('a100')"

clean:
	rm -rf $(VENV) build dist *.egg-info
