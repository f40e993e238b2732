# Two commands: `make run` (every notebook, tables, plots, report) and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test test-long lint badges test-colab clean
.DEFAULT_GOAL := run

run: $(VENV)/ready
	$(BIN)/python -m helpers run

test: $(VENV)/ready-dev lint
	$(BIN)/python -m pytest

test-long: $(VENV)/ready-dev
	$(BIN)/python -m pytest -m long

lint: $(VENV)/ready-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

$(VENV)/ready: requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 11) or sys.exit(f"Python 3.11 or newer is needed; $(PYTHON) is {v[0]}.{v[1]}. Try: make PYTHON=python3.12 run")'
	@echo "Installing into $(VENV), once: a few minutes, mostly torch"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements.txt -c constraints.txt
	touch $@

$(VENV)/ready-dev: $(VENV)/ready requirements-dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt -c constraints.txt
	touch $@

# Colab's packages under this Python: the classic notebook that its ipywidgets belongs to is tested with them.
.venv-colab/ready: requirements-colab.txt constraints.txt
	$(PYTHON) -m venv .venv-colab
	.venv-colab/bin/pip install --quiet --disable-pip-version-check -r requirements-colab.txt \
	    $$(grep -E '^(flexgen|papermill|torch)==' constraints.txt)
	touch $@

# Open-in-Colab badges and first cells point to the git remote, or to REPO=owner/name.
badges:
	$(PYTHON) -m helpers.setup.badges $(REPO)

# Every notebook and test with Colab's packages, where its Pythons are.
COLAB_PYTHONS ?= python3.13 python3.12
test-colab:
	for python in $(COLAB_PYTHONS); do tests/colab.sh $$python || exit; done

clean:
	rm -rf $(VENV) .venv-colab*
