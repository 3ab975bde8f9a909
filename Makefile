# Every target sets up what it needs: a virtual environment in .venv with the versions of constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
BENCH_READY := .venv/.ready-bench
DEMO_DIR ?= runs/demo-$(shell date +%Y%m%d-%H%M%S)
export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: help setup demo test lint bench clean

help:   ## show this list
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/ \t/' | expand -t 8

setup: $(READY)  ## create .venv and install the pinned versions

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,plot,track]'
	touch $@

$(BENCH_READY): $(READY)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bench]'
	touch $@

demo: $(READY)  ## pretrain a small Llama on the standard library of this Python: about three minutes on two cores
	$(BIN)/accelerate launch --config_file accelerate_configs/cpu.yaml recipes/pretrain.py \
		--config recipes/configs/demo.yaml --output_dir $(DEMO_DIR)

test: $(READY)  ## all tests; needs no network once set up
	$(BIN)/python -m pytest

lint: $(READY)  ## format, rules and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(BENCH_READY)  ## the side-by-side benchmarks of benchmarks/
	$(BIN)/python benchmarks/packing.py
	$(BIN)/python benchmarks/loss.py --contenders hf hf_z torch_256 trl ours ours_z
	$(BIN)/python benchmarks/isolation.py
	$(BIN)/python benchmarks/step_overhead.py
	$(BIN)/python benchmarks/noise_scale.py
	$(BIN)/python benchmarks/end_to_end.py
	$(BIN)/python benchmarks/bpb.py

clean:  ## remove the virtual environment and the caches of tests
	rm -rf .venv .cache
