# make VERB [PYTHON=python3.12] [EXTRAS=dev,torch] [ARGS=...]     the first run installs; the stamp remembers PYTHON and EXTRAS
.PHONY: help install demo compose-test test test-fast lint chaos chaos-long figures bench screenshot clean
unexport PYTHONPATH PYTHONHOME
export PIP_USER := 0
BIN := .venv/bin
STAMP := .venv/.installed
COMPILE := $(BIN)/python -P -c 'from paramserver.kernels import sockets, warm_up; warm_up(); sockets.warm_up()'
HAVE := $(shell test -x $(BIN)/python && cat $(STAMP) 2>/dev/null)
PYTHON := $(or $(PYTHON),$(word 1,$(HAVE)),python3)
EXTRAS := $(or $(EXTRAS),$(word 2,$(HAVE)),dev)
WANT := $(PYTHON) $(EXTRAS) $(CURDIR)
ifneq ($(HAVE),$(WANT))
.PHONY: $(STAMP)
endif
# Another Python, or a folder moved or copied (its scripts point elsewhere): from scratch. Else only pip runs again. A .venv that is a link is
# replaced: to clear it would empty another folder's environment.
ifneq ($(word 1,$(HAVE)) $(wordlist 3,99,$(HAVE)),$(PYTHON) $(CURDIR))
NEW := yes
endif

help:
	@echo 'make demo          train on real images with a real cluster of its own, and show it'
	@echo 'make test          lint, then every test, against real processes and a real Redis'
	@echo 'make test-fast     the tests of less than a minute, for daily work'
	@echo 'make lint          ruff and mypy --strict'
	@echo 'make chaos         whole clusters on virtual time under seeded faults: make chaos SEEDS=500'
	@echo 'make chaos-long    100 kills, 20 cut networks and ten minutes of goodput on real processes; writes docs/promises.md'
	@echo 'make figures       recovery and take-over times, levels, memory; writes docs/promises.md'
	@echo 'make compose-test  the compose file on a real engine: from nothing up, kills, scaling, down; a table of times and sizes'
	@echo 'make bench         how fast it is, side by side with Ray, torch RPC, gRPC, Redis: make bench EXTRAS=dev,bench; about an hour'
	@echo 'make screenshot    take the picture of the status page that the README shows (needs Chromium)'
	@echo 'make install       only the environment: .venv, with psctl in it'
	@echo 'make clean         remove .venv and dist'
install: $(STAMP)
demo: $(STAMP)
	@$(BIN)/psctl demo $(ARGS)
# Most wait for real processes, so three at a time; those whose times would suffer by it run alone (tests/conftest.py).
# The simulation, which only computes, comes first, so that others wait beside it; then in the order of their folders: the files of
# fewest tests, which xdist would take last, are the slowest.
# Kernels that have changed are compiled first, once: else each of the first tests' processes compiles them at the same time.
# What fails runs once more, with nothing beside it: a machine that stands still for seconds makes a timeout pass that should not.
twice = $(BIN)/pytest --cache-clear $(1) $(ARGS) || case $$? in 5) ;; 1) echo 'once more what failed, by itself:'; \
	$(BIN)/pytest --last-failed --maxfail 1 $(ARGS);; *) exit 1;; esac
test: lint
	@$(COMPILE)
	@$(call twice,-n 3 --dist loadfile --no-loadscope-reorder -m 'not alone')
	@$(call twice,-m alone)
test-fast: $(STAMP)
	@$(COMPILE)
	@$(BIN)/pytest -n 3 --dist loadfile -m 'not process and not slow' $(ARGS)
lint: $(STAMP)
	@$(BIN)/ruff format --check && $(BIN)/ruff check && $(BIN)/mypy
chaos: $(STAMP)
	@$(BIN)/python -P -m paramserver.testing.simulation --seeds $(or $(SEEDS),100)
chaos-long: $(STAMP)
	@$(BIN)/python -m tests.chaos.long $(or $(WHAT),all) --write
figures: $(STAMP)
	@$(BIN)/python -m tests.chaos.figures $(or $(WHAT),all) --write
compose-test: $(STAMP)
	@$(BIN)/python -m tests.compose.check $(ARGS)
bench: $(STAMP)
	@$(BIN)/python -m benchmarks.bench $(ARGS)
screenshot: $(STAMP)
	@PARAMSERVER_SCREENSHOT=1 $(BIN)/pytest -q tests/contract/test_browser.py -k screenshot
clean: ; rm -rf .venv dist
$(STAMP): pyproject.toml shared/paramserver/__init__.py
	@command -v $(PYTHON) >/dev/null || { echo '$(PYTHON) not found: install Python 3.11 or newer (Debian/Ubuntu: apt install python3 python3-venv; macOS: brew install python), or name one: make PYTHON=python3.12' >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("paramserver needs Python 3.11 or newer; name one: make PYTHON=python3.12")'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo 'this Python has no venv: apt install python3-venv (Debian/Ubuntu)' >&2; exit 1; }
	@$(if $(NEW),rm -f .venv 2>/dev/null; $(PYTHON) -m venv --clear .venv)
	@echo 'installing into .venv (about a minute, once)'
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input --editable '.[$(EXTRAS)]'
	@echo 'compiling the kernels (about 10 seconds, once)'
	@$(COMPILE)
	@echo '$(WANT)' > $@
