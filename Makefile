# Two commands do everything from a fresh clone, with Python 3.11 or newer: `make lab` and `make test`.
# Nothing needs activating. uv sets up .venv where it is installed, else venv and pip do.

PYTHON ?= python3
WORKERS ?= 2
LAB_ARGS ?=
TEST_ARGS ?=

PY := .venv/bin/python
ifneq ($(shell command -v uv 2>/dev/null),)
  VENV := uv venv --quiet --seed --python $(PYTHON) .venv
  INSTALL := uv pip install --quiet --python $(PY)
else
  VENV := $(PYTHON) -m venv .venv
  INSTALL := $(PY) -m pip install --quiet --disable-pip-version-check
endif

.PHONY: help lab test figures format

help:
	@echo "make lab      JupyterLab on the lessons   (LAB_ARGS='--no-browser' and the like go on to it)"
	@echo "make test     every test, the notebooks included   (TEST_ARGS='-k softmax', WORKERS=4)"
	@echo "make figures  draw figures/ again"
	@echo "make format   let ruff put code and notebooks in order"

lab: .venv/lab
	$(PY) -m jupyterlab --LabApp.default_url=/lab/tree/notebooks $(LAB_ARGS)

test: .venv/test
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(PY) -m pytest -n $(WORKERS) --dist worksteal --durations 10 --ignore flashref/tests/browser $(TEST_ARGS)
	$(PY) -m pytest flashref/tests/browser --durations 10 $(TEST_ARGS) || [ $$? -eq 5 ] # one browser, undisturbed; 5: none chosen

figures: .venv/lab
	$(PY) -m flashref figures

format: .venv/test
	$(PY) -m ruff check --fix
	$(PY) -m ruff format

# A stamp in .venv says that an installation is done; it is done again when what it reads changes.
.venv/lab: requirements.txt pyproject.toml | $(PY)
	@echo "Installing requirements.txt into .venv: a few minutes the first time"
	$(INSTALL) -r requirements.txt
	@touch $@

.venv/test: .venv/lab
	$(INSTALL) -e '.[test]'
	@touch $@

$(PY):
	@$(PYTHON) -c 'import sys; v = sys.version.split()[0]; sys.version_info < (3, 11) and sys.exit(f"flashref needs Python 3.11 or newer, and $(PYTHON) is {v}: try make PYTHON=python3.12")'
	$(VENV)
