# Each target does everything from a fresh clone; a second run finds the environment ready.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python -m
PIP := $(RUN) pip install --disable-pip-version-check -q -c constraints.txt
ONE_THREAD := OMP_NUM_THREADS=1 $(RUN)
PYTEST := pytest -n 2 --dist loadfile --max-worker-restart 0 # else a crash waits for ever

.PHONY: install reproduce reproduce-all check quick test coverage lint docs wheel install-detection install-llm

install: $(VENV)/.base

reproduce: $(VENV)/.base
	$(RUN) experiments.reproduce

# With the tables that need the extras `detection` and `llm`.
reproduce-all: install-detection install-llm
	$(RUN) experiments.reproduce

# The inner loop: style, types, and the tests of units and components, in a few minutes. mypy uses one core, so the tests
# begin beside it.
check: $(VENV)/.test
	$(MAKE) --no-print-directory -j 2 lint quick

quick: $(VENV)/.test
	$(ONE_THREAD) $(PYTEST) -m 'not system and not external' --durations 5

# All tests.
test: check
	$(ONE_THREAD) $(PYTEST) -m 'system or external' --no-loadscope-reorder --durations 25

# All tests, and the share of the code that they run. The tracer takes as long as the tests before Python 3.12.
coverage: $(VENV)/.test
	$(ONE_THREAD) $(PYTEST) --cov

lint: $(VENV)/.test
	$(RUN) ruff check
	$(RUN) ruff format --check
	$(RUN) mypy
	$(VENV)/bin/lint-imports --no-cache

# Tables and numbers of the pages, from docstrings and records; and site/, to be opened at site/index.html.
docs: $(VENV)/.test
	$(VENV)/bin/python docs/make_tables.py
	$(VENV)/bin/python docs/claims_figure.py
	$(RUN) mkdocs build --strict

# For machines without a clone: the library alone, and the experiments with the small networks.
wheel: $(VENV)/bin/python
	$(RUN) pip wheel -q --no-deps -w dist . ./experiments

install-detection: $(VENV)/.detection

install-llm: $(VENV)/.llm

$(VENV)/.detection: pyproject.toml constraints.txt | $(VENV)/.mmcv
	$(PIP) -e '.[detection]'
	touch $@

$(VENV)/.llm: pyproject.toml constraints.txt | $(VENV)/.base
	$(PIP) -e '.[llm]'
	touch $@

# mmcv has operators in C++. It is built here, with PyTorch in sight, since a plain install silently leaves them out; in
# C++20, which recent PyTorch's headers ask for; and not optimised. PyTorch's headers take longer than the operators: as
# far as their names allow, files are compiled together, in one minute on two cores rather than seven.
MMCV := $(VENV)/mmcv
TOGETHER = for file in $$(ls *.cpp | grep -Ev '^($(1))\.cpp$$'); do mv $$file $$file.inc && echo '\#include "'$$file.inc'"'; \
	done > together && mv together together.cpp
$(VENV)/.mmcv: | $(VENV)/.base
	$(PIP) ninja psutil setuptools wheel
	rm -rf $(MMCV) && mkdir $(MMCV)
	$(RUN) pip download -q --no-deps --no-build-isolation --no-binary :all: -c constraints.txt -d $(MMCV) onedl-mmcv
	tar -xzf $(MMCV)/*.tar.gz -C $(MMCV) --strip-components 1
	sed -i.as-published 's/-std=c++17/-std=c++20/' $(MMCV)/setup.py
	cd $(MMCV)/mmcv/ops/csrc/pytorch && $(call TOGETHER,pybind)
	cd $(MMCV)/mmcv/ops/csrc/pytorch/cpu && $(call TOGETHER,roi_align|roi_align_rotated|psamask|rotated_feature_align)
	CFLAGS="-O0 -g0 -w" MAX_JOBS=2 $(PIP) --no-deps --no-build-isolation ./$(MMCV)
	rm -r $(MMCV)
	touch $@

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# The test environment holds the base one, and that for language models.
$(VENV)/.base: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[analysis,experiments,pruning]'
	touch $@

$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e '.[test]'
	touch $(VENV)/.base $(VENV)/.llm $@
