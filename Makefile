# Everything a newcomer needs: `make run` and `make test`. Both set up .venv first, once per change of
# pyproject.toml, setup.py or constraints.txt.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 2

# Generated Verilog must not depend on the hash seed; see hw/build/verilog.py.
export PYTHONHASHSEED := 0

.PHONY: help run test synth lint format type-links doctor clean distclean

help:
	@echo "make run        set up, run the default system study and one adapter through the RTL (results in out/)"
	@echo "make test       set up, check style and types, run every test"
	@echo "make synth      set up, area, timing and power of the full device beside the paper's (results in out/synth)"
	@echo "make lint       style and types only"
	@echo "make doctor     list every tool, what it is for, how to get it"
	@echo "make clean      remove build/ and out/; make distclean removes .venv too"

run: $(VENV)/.ready-rtl
	@$(BIN)/plora run --num-adapters 2000 --out out/run
	@$(BIN)/plora lora --adapter tests/fixtures/peft/lora_qv_r8 --device rtl --out out/lora

test: $(VENV)/.ready-test
	@mkdir -p build; status=0; \
	 $(MAKE) --no-print-directory lint || status=1; \
	 $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --junitxml build/test-results.xml || status=1; \
	 exit $$status

synth: $(VENV)/.ready-test
	@$(BIN)/plora synth --preset full --check --power --trade \
	  --fpga pe.drain --fpga lane.product --fpga lane.align --out out/synth

lint: $(VENV)/.ready-test type-links
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy build/types/plora tests

format: $(VENV)/.ready-test
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

doctor: $(VENV)/.ready-rtl
	@$(BIN)/plora doctor

# Type checkers cannot follow the mapping of plora.hw to hw/ (pyproject.toml, [tool.mypy]); links can.
type-links:
	@mkdir -p build/types/plora
	@for layer in hw sim sw synth; do ln -sfn ../../../$$layer build/types/plora/$$layer; done

clean:
	rm -rf build out .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find hw sim sw tests -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV) *.egg-info

# $(call install,EXTRAS): one installation at a time, and one clear line for each thing that can be missing.
define install
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found: install Python 3.11 or newer, or set PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: $$($(PYTHON) --version) is too old: install Python 3.11 or newer, or set PYTHON=" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) has no venv: install python3-venv" >&2; exit 1; }
	@command -v g++ >/dev/null || command -v "$${CXX:-g++}" >/dev/null || { echo "make: g++ not found: install g++, or set CXX to a C++17 compiler" >&2; exit 1; }
	@mkdir -p build
	@exec 9>build/.setup-lock; \
	 if command -v flock >/dev/null && ! flock -n 9; then \
	   echo "make: another make is setting up $(VENV): wait for it, then try again" >&2; exit 1; fi; \
	 echo "setting up $(VENV) ($(1))" >&2; \
	 [ -x $(BIN)/python ] || $(PYTHON) -m venv $(VENV); \
	 $(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[$(1)]'; \
	 touch $@
endef

$(VENV)/.ready-rtl: pyproject.toml setup.py constraints.txt
	$(call install,rtl)

$(VENV)/.ready-test: pyproject.toml setup.py constraints.txt
	$(call install,rtl$(COMMA)synth$(COMMA)test$(COMMA)dev)
	@touch $(VENV)/.ready-rtl

COMMA := ,
