# `make demo` shows what Tandem does, `make test` proves that it changed no token. Both build on `make setup`.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: setup demo test lint suite nightly cross clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt CMakeLists.txt $(wildcard tandem/kernels/cpu/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev]"
	@touch $(READY)

demo: setup
	$(BIN)/tandem demo

test: lint suite

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/budget.py

suite: setup
	$(BIN)/tandem pull smollm2-135m
	$(BIN)/python -m pytest

# The real-text check at full size, 200,000 tokens: make nightly DATA=folder-of-prompt-files
nightly: setup
	$(BIN)/python tools/real_text.py --data "$(DATA)"

# The portable kernels must compile for other processors too.
cross: setup
	$(BIN)/python -m pip install --quiet ziglang && mkdir -p build
	for file in portable api pack team; do $(BIN)/python -m ziglang c++ -target aarch64-linux-gnu -std=c++20 -Wall \
		-c -o build/cross.o tandem/kernels/cpu/$$file.cpp || exit 1; done

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
