# Everything below works in .venv, which is made on first use. PYTHON=... chooses the interpreter (3.11 or newer).
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11,$(if $(shell $(p) -c 'import sys; print(sys.version_info >= (3, 11) or "")' 2>/dev/null),$(p))) python3)
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: install train test check clean

install: $(STAMP) ## make .venv and install Meshwright into it (again only when pyproject.toml changes)
	@:

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
	  { echo "Meshwright needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Set it: make $(MAKECMDGOALS) PYTHON=/path/to/python3.12" >&2; exit 1; }
	@echo "Installing Meshwright and what it needs into .venv with $(PYTHON) (once; about a minute, 1.6 GB with libtpu)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv || \
	  { rm -rf .venv; echo "$(PYTHON) cannot make a virtual environment: install its venv package (Debian, Ubuntu: python3-venv)" >&2; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[tpu,dev]"
	@touch $(STAMP)

train: install ## train a small Llama on 8 emulated devices
	@$(BIN)/meshwright train llama-demo --layout "data=2 fsdp=2 tensor=2" --devices 8

test: install ## the tests
	@$(BIN)/python -m pytest

check: install ## lint, format, types and tests
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright
	@$(BIN)/python -m pytest

clean: ## remove the environment and caches, but no run
	rm -rf .venv .pytest_cache .ruff_cache build src/*.egg-info
