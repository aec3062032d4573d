# Everything sets itself up: `make demo` answers a question about a picture, `make test` proves that it is right.
# Commands run in an environment of their own (.venv); torch is pinned here because pip takes a CPU build of it.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUN_READY := $(VENV)/.run-ready
DEV_READY := $(VENV)/.dev-ready
PICTURE := docs/images/demo.png
QUESTION := What colour is the diamond?

.PHONY: demo test check unit fmt clean train-tiny

demo: $(RUN_READY)
	$(BIN)/deepspan generate --image $(PICTURE) "$(QUESTION)"

test: $(DEV_READY) check
	$(BIN)/python -m pytest

check: $(DEV_READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

unit: $(DEV_READY)
	$(BIN)/python -m pytest tests/unit

fmt: $(DEV_READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Hours on two cores; stop it and run it again as often as you like. glibc must keep freed memory, or every large tensor
# costs its page faults again.
train-tiny: $(DEV_READY)
	$(BIN)/python -m pip install --quiet matplotlib
	MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=8589934592 MALLOC_TOP_PAD_=268435456 \
		$(BIN)/python -m training.train build/train-tiny --ranks $(shell nproc)
	$(BIN)/python -m training.export build/train-tiny build/deepspan-tiny
	$(BIN)/python -m training.plot build/train-tiny/log.jsonl build/train-tiny/curves.png
	$(BIN)/python -m training.contact_sheet build/train-tiny/samples.png --skill scene --count 16

clean:
	rm -rf $(VENV) build

$(RUN_READY): requirements.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "deepspan needs Python 3.11 or later")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --requirement requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

$(DEV_READY): $(RUN_READY) requirements-dev.txt
	$(BIN)/python -m pip install --quiet --requirement requirements-dev.txt
	touch $@
