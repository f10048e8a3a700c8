PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: quickstart identity alpaca test check format clean

quickstart: $(STAMP)
	$(BIN)/python examples/quickstart.py

identity alpaca: $(STAMP)
	$(BIN)/python examples/$@.py

test: $(STAMP)
	$(BIN)/python -m pytest -q -m "not slow and not gpu" $(TESTS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,quickstart]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) .cache runs .pytest_cache .mypy_cache .ruff_cache
