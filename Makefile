# `make demo` and `make test` need Python 3.11 or later with venv, git and make, and nothing done before.
# Both may be run again at any time, with or without root.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# The tests are about a stock browser; the settings of whoever runs them are not theirs. They start Python and Node a
# thousand times: both shall compile what they run once.
TEST_ENVIRONMENT := env -u PYTHONDONTWRITEBYTECODE NODE_COMPILE_CACHE=$(CURDIR)/$(VENV)/node $(foreach name,$(filter ASYNCWORKER_%,$(shell env | cut -d= -f1)),-u $(name))

# Most tests wait: for a browser, for a worker, for a deadline. So more run at once than a small machine has cores;
# one after the other, and under a debugger: make test ARGS="-n 0".
AT_ONCE ?= 3

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL:
.PHONY: help demo test long celery-suite check browser rabbitmq bench clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(INSTALLED) ## 40 pages scraped by a real worker; options in ARGS="--json"
	@$(BIN)/asyncworker demo $(ARGS)

test: $(INSTALLED) browser rabbitmq check ## a browser, RabbitMQ, lint, types and all tests but the longest; options in ARGS="-k crash"
	$(TEST_ENVIRONMENT) $(BIN)/pytest -n $(AT_ONCE) --dist worksteal -m "not long" $(ARGS)

long: $(INSTALLED) browser rabbitmq ## the tests that `make test` leaves out, since they take so much time
	$(TEST_ENVIRONMENT) $(BIN)/pytest -n $(AT_ONCE) --dist worksteal -m long $(ARGS)

celery-suite: $(INSTALLED) ## tests of Celery's own on its worker and on ours, 20 minutes; options in ARGS="--side ours"
	$(TEST_ENVIRONMENT) $(BIN)/python -m tests.celery.own_suite $(ARGS)

check: $(INSTALLED) ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

browser: $(INSTALLED) ## find or install the browser of the tests
	@$(TEST_ENVIRONMENT) ASYNCWORKER_ENGINE=chromium $(BIN)/asyncworker doctor --install

rabbitmq: $(INSTALLED) ## find or install the RabbitMQ server of the tests; no service is started
	@$(BIN)/python -m tests.getting_rabbitmq

bench: $(INSTALLED) browser ## every benchmark; options in ARGS="--quick"
	@for script in benchmarks/[!_]*.py; do \
	  echo "== $$script"; ASYNCWORKER_ENGINE=chromium $(BIN)/python "$$script" $(ARGS) || failed=1; \
	done; test -z "$$failed"

clean: ## remove what was installed and cached; the state and the output of workers stay
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON) on this machine; install Python 3.11 or later, or name it: make PYTHON=…" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or later is needed, and $(PYTHON) is $$($(PYTHON) -V 2>&1); name a newer one: make PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "Python's venv is missing: apt-get install python3-venv" >&2; exit 1; }
	@echo "installing into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) install --upgrade 'pip>=25.1'
	@$(PIP) install --editable . --group dev
	@touch $@
