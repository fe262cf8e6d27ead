# Everything a person does here, from nothing but Python 3.11, g++ and make.

PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3.11)

VENV := .venv
BIN := $(CURDIR)/$(VENV)/bin
PIP := $(BIN)/python -m pip install
DONE := $(VENV)/done
# Without -P, Python puts the current directory first in sys.path and `import cachestore_connector`
# finds the source tree, which has no compiled extension, instead of the installed package. The
# variable does the same for the Python processes that tests start. (pytest's own share is
# --import-mode=importlib, in pyproject.toml.)
RUN := PYTHONSAFEPATH=1 $(BIN)/python -P

PACKAGE_SOURCES := $(sort $(shell find cachestore_connector native/include native/src -type f \
    -not -path '*/__pycache__/*' -not -name '*.so' -not -name '_native*' 2>/dev/null) \
    $(wildcard pyproject.toml setup.py MANIFEST.in README.md LICENSE))
NATIVE_SOURCES = $(shell find native tests/native -name '*.h' -o -name '*.cc' -o -name '*.c')
SANITIZERS ?= address thread

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
ifndef HALVES
.NOTPARALLEL:
endif
.PHONY: help setup demo test soak bench lint clean FORCE
.PHONY: native-build native-test native-soak python-test e2e-test

help: ## this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1	/p' $(MAKEFILE_LIST) | expand -t 14

setup: $(DONE)/package ## create .venv and install SGLang, the rig and this package into it

demo: setup ## the real SGLang server stores and restores KV pages (about three minutes)
	@PYTHONPATH=tests $(RUN) -m rig.demo $(DEMO)

test: lint native-test ## all set-up, then every test that fits a short run
	@$(MAKE) --no-print-directory --jobs=2 HALVES=at-once python-test e2e-test

# The two halves of `make test`: a starting server waits a lot for itself. What the first one prints
# is shown when it has ended, not in between.
python-test: setup
	@echo "[test] python tests, into build/python-test.log"
	@mkdir -p build; status=0; \
	$(RUN) -m pytest -m "not soak" --ignore=tests/e2e >build/python-test.log 2>&1 || status=$$?; \
	cat build/python-test.log; exit $$status

e2e-test: setup
	@echo "[test] end to end with the real SGLang server"
	@$(RUN) -m pytest -m "not soak" tests/e2e

soak: setup native-soak ## the tests that take longer
	$(RUN) -m pytest -m soak

bench: setup ## side by side with SGLang's file backend, the raw limits and LRU (BENCH='--quick')
	@# Appended to sys.path: the repository's benchmarks, but the installed package.
	@$(RUN) -c "import runpy, sys; sys.path.append('.'); \
	    runpy.run_module('benchmarks', run_name='__main__', alter_sys=True)" $(BENCH)

lint: setup ## ruff and clang-format, changing nothing
	@echo "[lint] ruff, clang-format"
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/clang-format --dry-run -Werror $(NATIVE_SOURCES)

# TSan can't run under some kernels' address space randomisation, which setarch turns off where that
# is permitted.
define native-run
fixed=; setarch -R true 2>/dev/null && fixed="setarch -R"; \
for sanitizer in $(SANITIZERS); do \
    echo "[test] native tests, $$sanitizer sanitizer"; \
    $$fixed "$(BIN)/ctest" --test-dir build/native-$$sanitizer --parallel 2 --output-on-failure $(1); \
done
endef

# Part of the set-up, as compiling the package is: about two minutes for each sanitizer the first
# time, and only what changed afterwards.
native-build: setup
	@for sanitizer in $(SANITIZERS); do \
	    build=build/native-$$sanitizer; mkdir -p $$build; \
	    echo "[setup] compiling the native tests, $$sanitizer sanitizer"; \
	    PATH="$(BIN):$$PATH"; \
	    { cmake -S native -B $$build -G Ninja -DCACHESTORE_SANITIZE=$$sanitizer \
	        && cmake --build $$build; } >$$build.log 2>&1 || { cat $$build.log; exit 1; }; \
	done

native-test: native-build
	@$(call native-run,-LE soak)

native-soak: native-build
	@$(call native-run,-L soak --no-tests=ignore)

clean: ## remove what was built; .venv stays
	rm -rf build dist *.egg-info tests/rig/plugin/build tests/rig/plugin/*.egg-info
	rm -rf .pytest_cache .ruff_cache
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

# Set-up: one file for each step that is done, so that a second run does nothing.

$(DONE)/venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
	    || { echo "Python 3.11 is needed; say which: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "[setup] creating $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@mkdir -p $(DONE); touch $@

$(DONE)/torch: tests/rig/requirements-torch.txt $(DONE)/venv
	@echo "[setup] installing torch ... (about 3 GB)"
	@$(PIP) -r $< | sed '/^Requirement already satisfied/d'
	@touch $@

$(DONE)/requirements: tests/rig/requirements.txt $(DONE)/torch
	@echo "[setup] installing what SGLang imports, and the tools of the tests ..."
	@$(PIP) --quiet -r $<
	@touch $@

# After what it imports: pip would complain there of everything that --no-deps leaves out.
$(DONE)/sglang: tests/rig/requirements-sglang.txt $(DONE)/requirements
	@echo "[setup] installing SGLang"
	@$(PIP) --quiet --no-deps -r $<
	@touch $@

$(DONE)/rig: $(wildcard tests/rig/plugin/*.*) $(DONE)/sglang
	@echo "[setup] installing the rig's plugin"
	@$(PIP) --quiet --no-deps --no-build-isolation --force-reinstall tests/rig/plugin
	@rm -rf tests/rig/plugin/build tests/rig/plugin/*.egg-info
	@touch $@

# The list of sources is a source too: a file that was deleted counts.
$(DONE)/sources: FORCE | $(DONE)/venv
	@printf '%s\n' $(PACKAGE_SOURCES) | cmp -s - $@ || printf '%s\n' $(PACKAGE_SOURCES) >$@

# setuptools would take deleted modules and stale objects from an earlier build/ into the wheel.
$(DONE)/package: $(PACKAGE_SOURCES) $(DONE)/sources $(DONE)/rig
	@echo "[setup] compiling and installing cachestore ..."
	@rm -rf build/lib.* build/temp.* build/bdist.*
	@$(PIP) --quiet .
	@touch $@
