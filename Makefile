# Each target does everything from a fresh clone; a second run finds the environment ready.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -m

.PHONY: reproduce test

reproduce: $(VENV)/.base
	$(RUN) experiments.reproduce

test: $(VENV)/.test
	$(RUN) ruff check
	$(RUN) ruff format --check
	OMP_NUM_THREADS=1 $(RUN) pytest -n 2 --dist loadfile --no-loadscope-reorder

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The test environment holds the base one.
$(VENV)/.base: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(RUN) pip install --disable-pip-version-check -q -c constraints.txt -e '.[analysis,pruning]'
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(RUN) pip install --disable-pip-version-check -q -c constraints.txt -e '.[test]'
	touch $(VENV)/.base $@
