# Everything runs inside .venv, made on first use; `make help` lists the targets.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: help demo test test-slow check format bench docs clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-10s %s\n", $$1, $$2}'

# The stamp is newer than both files exactly when the environment matches them, so a second call does nothing.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "lockstep needs Python 3.11 or newer; set PYTHON=…"; exit 2; }
	@echo "installing into .venv (a minute or two the first time) …"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(INSTALLED) ## train the digits recipe on two processes and on one, and compare the bits
	@$(BIN)/lockstep train digits -n 2 --run runs/two-processes
	@$(BIN)/lockstep train digits --run runs/one-process
	@echo
	@for run in two-processes one-process; do \
		printf '%-14s ' $$run; tail -n 1 runs/$$run/events.jsonl | sed 's/.*"digest": "\([0-9a-f]*\)".*/\1/'; \
	done | tee runs/digests
	@test $$(awk '{print $$2}' runs/digests | sort -u | wc -l) = 1 || { echo "the digests differ"; exit 1; }
	@echo "the same weights, buffers and optimizer state, bit for bit"
	@echo
	@echo "try next:"
	@echo "  $(BIN)/lockstep train digits model.width=64 --run runs/wide      another model, one process"
	@echo "  $(BIN)/lockstep run -n 2 YOUR_SCRIPT.py                          your own script on two processes"
	@echo "  $(BIN)/lockstep --help"

test: $(INSTALLED) ## the test suite (about ten minutes on two cores)
	@$(BIN)/python -m pytest -m "not slow" --numprocesses 2 --dist worksteal

test-slow: $(INSTALLED) ## the long tier (about eight minutes more)
	@$(BIN)/python -m pytest -m slow --numprocesses 2 --dist worksteal

check: $(INSTALLED) ## format, lint, types
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

format: $(INSTALLED) ## rewrite the code in the house format
	@$(BIN)/ruff check --fix --quiet . || true
	@$(BIN)/ruff format .

bench: $(INSTALLED) ## measure and print the tables of bench/RESULTS.md
	@$(BIN)/python bench/startup.py
	@$(BIN)/python bench/one_process.py
	@$(BIN)/python bench/two_processes.py
	@$(BIN)/lockstep bench

docs: $(INSTALLED) ## build the guide into docs/_build/html; any warning is an error
	@$(BIN)/python -m sphinx -W --keep-going --quiet -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

clean: ## remove the environment and every run
	rm -rf .venv runs
