# Every target sets up what it needs in .venv, once; `make` alone lists them. Extra arguments go in ARGS="...".

SHELL := /bin/bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
LAUNCH := $(BIN)/accelerate launch --use_deepspeed --zero_stage 1 --num_machines 1 --mixed_precision no --dynamo_backend no

# More threads than cores collapse when several ranks share a machine.
export OMP_NUM_THREADS := 1
export OMP_WAIT_POLICY := PASSIVE
export TOKENIZERS_PARALLELISM := false

BENCHES := $(patsubst recipes/bench_%.py,%,$(sort $(wildcard recipes/bench_*.py)))

# Named after the content of the files that say what to install, so that a new clone or a touched file installs nothing again.
CONTENT := $(shell cat setup.cfg pyproject.toml constraints.txt | cksum | cut -d' ' -f1)
INSTALLED := $(VENV)/.installed-$(CONTENT)
PEERS := $(VENV)/.installed-peers-$(CONTENT)

.DEFAULT_GOAL := help
.PHONY: help setup quality style test demo bench eval clean $(BENCHES:%=bench-%)

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(INSTALLED) ## create .venv with the pinned packages (every target below does this by itself)

quality: $(INSTALLED) ## check lint, format and types; changes nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

style: $(INSTALLED) ## fix what ruff can fix, and format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: $(INSTALLED) ## run the tests; ARGS="-k dispatch" or ARGS=tests/test_x.py for some
	$(BIN)/python -m pytest $(ARGS)

# On the CPUs of any machine: fewer than four GPUs would not do for four ranks.
demo: $(INSTALLED) ## place, prune and run an embedded model on four processes
	CUDA_VISIBLE_DEVICES= DS_ACCELERATOR=cpu $(LAUNCH) --num_processes 4 recipes/demo.py $(ARGS)

bench: $(BENCHES:%=bench-%) ## run every benchmark

bench-placement: ## placements side by side with METIS, Mt-KaHyPar and EPLB on real routing (5 minutes)
bench-recorder: ## what recording costs
bench-evaluation: ## what an evaluation costs beside the stock harness (6 minutes)
bench-runtime: ## bytes and time per MoE layer beside Transformers' all_to_all and DeepSpeed's AutoEP (28 minutes)

$(BENCHES:%=bench-%): bench-%: $(INSTALLED) $(PEERS)
	$(BIN)/python recipes/bench_$*.py $(ARGS)

# Its result stays in EVAL_OUT; a run that was interrupted goes on from there.
MODEL := cap_hf/models/tiny_qwen3_moe
EVAL_OUT := build/eval/$(notdir $(MODEL))
eval: $(EVAL_OUT)/layout.json ## accuracy of an embedded model against the pruning threshold (8 minutes); MODEL=... for another
	$(BIN)/python eval/run.py --model $(MODEL) --layout $< --output-dir $(EVAL_OUT) --pruning both --thresholds 0,0.2,0.3 \
		--tasks wikitext,gsm8k,humaneval,mmlu --limit wikitext=24,gsm8k=24,humaneval=24,mmlu=2 --run-generated-code $(ARGS)

$(EVAL_OUT)/layout.json: $(INSTALLED)
	$(BIN)/cap-hf trace --model $(MODEL) --num-ranks 8 --output $(EVAL_OUT)/trace.safetensors
	$(BIN)/cap-hf place $(EVAL_OUT)/trace.safetensors --num-ranks 8 --output $@

clean: ## remove caches and package builds; .venv and recipes' results stay
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info dist build/lib build/bdist.*
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

$(INSTALLED):
	@command -v $(PYTHON) >/dev/null || { echo "$(PYTHON) is not installed; name a Python 3.11: make PYTHON=/path/to/python $(MAKECMDGOALS)" >&2; exit 1; }
	@echo "Setting up $(VENV); the first time this takes some minutes"
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@[ -t 1 ] || quiet=--quiet; $(BIN)/python -m pip install $$quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	rm -f $(VENV)/.installed-*
	touch $@

# What only benchmarks compare with.
$(PEERS): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	touch $@
