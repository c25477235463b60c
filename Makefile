# Every target does its own set-up; a second call reuses it.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

# The Python to use, tried in this order: make setup PYTHON=python3.13
PYTHON ?= python3.11 python3.12 python3.13 python3
OLDEST_PYTHON ?= python3.11 python3.12
# An index with CPU builds of torch, for machines where PyPI's CUDA build is too much:
# make setup TORCH_INDEX=URL
export TORCH_INDEX

BIN := $(CURDIR)/.venv/bin
RUN := JAVA_HOME="$$(cat .venv/java_home)" PATH="$(BIN):$$PATH"
READY := .venv/packages.stamp .venv/java_home
MASTER ?= local-cluster[2,1,2048]
OLDEST := JAVA_HOME="$$(tools/java.sh)" PATH="$(CURDIR)/.venv-oldest/bin:$$PATH"
# What asks most of other versions' interfaces; the rest of the ranks' tests is in test-oldest-full.
OLDEST_DIST := $(addprefix tests/dist/test_,parity.py lora.py exporting.py main.py checkpoint_files.py)
OLDEST_SPARK := tests/spark/test_train.py::test_train_on_two_executors
QUICK := -m "not slow and not gpu"
# Unit tests take one processor each; ranks and executors have the machine for themselves.
WORKERS ?= 2
UNIT := tests/unit -n $(WORKERS) --dist loadfile
REST := tests/dist tests/spark tests/notebooks
PYTEST_ARGS ?=

.PHONY: help
help: ## Show this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do printf '  make %-12s %s\n' "$$name" "$$text"; done

.PHONY: setup
setup: $(READY) ## Python packages in .venv and a Java runtime
	@echo 'Ready: make demo, make test. For commands of your own (dbx-llmtrain, pytest, mlflow):'
	@echo '  source .venv/bin/activate'
	@echo '  export JAVA_HOME="$$(cat .venv/java_home)"'

.venv/packages.stamp: pyproject.toml constraints/newest.txt tools/venv.sh
	@tools/venv.sh .venv constraints/newest.txt $(PYTHON)
	@touch $@

# Looked for again when the one that was found has gone.
ifeq ($(wildcard $(addsuffix /bin/java,$(shell cat .venv/java_home 2>/dev/null))),)
.PHONY: .venv/java_home
endif
.venv/java_home: tools/java.sh | .venv/packages.stamp
	@tools/java.sh > $@

# Looked for again when there was none, or it has gone.
ifeq ($(wildcard $(shell cat .venv/browser 2>/dev/null)),)
.PHONY: .venv/browser
endif
.venv/browser: tools/browser.sh | .venv/packages.stamp
	@tools/browser.sh > $@

.PHONY: demo
demo: $(READY) ## Fine-tune a real model on two Spark executors and show an answer
	@[ -f examples/data/stdlib_qa_heldout.jsonl ] || $(RUN) python examples/make_stdlib_qa.py
	@$(RUN) dbx-llmtrain train examples/quickstart.yaml --master '$(MASTER)'
	@$(RUN) python examples/show_answers.py runs

.PHONY: test
test: $(READY) .venv/browser ## The tests, without the slow ones
	@$(RUN) python -m pytest $(QUICK) $(UNIT) $(PYTEST_ARGS)
	@$(RUN) CHROMIUM="$$(cat .venv/browser)" python -m pytest $(QUICK) $(REST) $(PYTEST_ARGS)

.PHONY: test-full
test-full: $(READY) .venv/browser ## All tests; what needs a GPU says so when there is none
	@$(RUN) CHROMIUM="$$(cat .venv/browser)" python -m pytest $(PYTEST_ARGS)

# How often the fault suite runs: make faults N=20
N ?= 1
.PHONY: faults
faults: $(READY) ## The fault suite N times: ranks, executors and drivers are killed
	@for i in $$(seq $(N)); do echo "faults: $$i of $(N)"; $(RUN) python -m pytest -q tests/spark/test_faults.py $(PYTEST_ARGS) || exit 1; done

.PHONY: test-oldest
test-oldest: .venv-oldest/packages.stamp ## Unit tests, ranks and one Spark run on the oldest versions
	@$(OLDEST) python -m pytest $(QUICK) $(UNIT) $(PYTEST_ARGS)
	@$(OLDEST) python -m pytest $(QUICK) $(OLDEST_DIST) $(OLDEST_SPARK) $(PYTEST_ARGS)

.PHONY: test-oldest-full
test-oldest-full: .venv-oldest/packages.stamp ## All unit and rank tests on the oldest versions
	@$(OLDEST) python -m pytest tests/unit tests/dist $(OLDEST_SPARK) $(PYTEST_ARGS)

.venv-oldest/packages.stamp: pyproject.toml constraints/oldest.txt tools/venv.sh
	@tools/venv.sh .venv-oldest constraints/oldest.txt $(OLDEST_PYTHON)
	@touch $@

.PHONY: lint
lint: .venv/packages.stamp ## ruff and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

.PHONY: format
format: .venv/packages.stamp ## Lay the code out as lint wants it
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

.PHONY: wheel
wheel: .venv/packages.stamp ## The package for a cluster, in dist/
	@$(BIN)/python -m pip wheel --quiet --no-deps -w dist .
	@ls dist/*.whl

.PHONY: clean
clean: ## Remove the environments and what runs and tools left
	rm -rf .venv .venv-oldest .mypy_cache .ruff_cache .pytest_cache build dist runs examples/data *.egg-info
