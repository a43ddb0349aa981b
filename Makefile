# Every command of sft-play. `make` alone lists them.
#
# A variable given on the command line reaches the commands through the environment, to the letter: the
# block below takes its text before make could expand it, and no recipe pastes a value into the shell.
ifneq ($(filter 3.%,$(MAKE_VERSION)),)
$(error make $(MAKE_VERSION) is too old: GNU make 4 or newer is needed (on macOS: brew install make, then call gmake))
endif
export SFT_PLAY_MAKE_VARIABLES := $(foreach v,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(v)))),$(v)))
$(foreach v,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(v)))),$(eval override $(v) := $$(value $(v)))$(eval export $(v))))
export PYTHON ?= python3
override SHELL := /bin/sh
MAKEFLAGS += --no-builtin-rules
.DEFAULT_GOAL := help

override READY := .venv/installed
override SFT_PLAY := .venv/bin/python -m sft_play

.PHONY: help install install-unsloth setup-accelerate demo config data-check plan gpu-info memory-check doctor train train-distributed \
	train-deepspeed train-distributed-tb train-deepspeed-tb verify-resume smoke slurm eval infer \
	serve chat download merge export push report compare runs clean-runs tensorboard test test-faults test-all soak bench bench-overhead docs

help: ## List the commands (this page)
	@awk -f sft_play/cli/help.awk Makefile

install: ## Create .venv and install the pinned stack; nothing happens when it is current (PYTHON=, TORCH_INDEX=)
	@"$$PYTHON" -m sft_play.cli.install

install-unsloth: ## Create .venv-unsloth for configs with tuning.backend: unsloth, beside .venv (TORCH_INDEX=)
	@"$$PYTHON" -m sft_play.cli.install unsloth

$(READY): pyproject.toml constraints.txt
	@"$$PYTHON" -m sft_play.cli.install

setup-accelerate: $(READY) ## Write down this machine's GPUs and precision for accelerate and every config (INTERACTIVE=1 asks)
	@$(SFT_PLAY) setup-accelerate

demo: $(READY) ## Fine-tune a real 135M model on this machine and see it answer before and after
	@$(SFT_PLAY) demo

config: $(READY) ## Show every value of a config and where it comes from (CONFIG=, KEY=, ARGS=--json)
	@$(SFT_PLAY) config

data-check: $(READY) ## Every bad row, doubles and leaks, lengths, what is learned, real rows; no GPU (CONFIG=, ARGS=--json)
	@$(SFT_PLAY) data-check

plan: $(READY) ## What fits, how fast, how long and why, before anything is loaded (CONFIG=, HARDWARE=2xH100-80, CALIBRATE=1)
	@$(SFT_PLAY) plan

gpu-info: $(READY) ## The GPUs, their links, the CPU, memory, disk and versions of this machine (ARGS=--json)
	@$(SFT_PLAY) gpu-info

memory-check: $(READY) ## What each GPU holds now and by which process, beside what a plan needs (CONFIG=)
	@$(SFT_PLAY) memory-check

doctor: $(READY) ## Is this machine fit to train: versions, GPUs, kernels, links, disk, ports, hub; each with its cure (CONFIG=)
	@$(SFT_PLAY) doctor

train: $(READY) ## Fine-tune, on one GPU or the CPU unless told of more (CONFIG=, any SECTION_KEY=value)
	@$(SFT_PLAY) train

train-distributed: $(READY) ## Fine-tune on all GPUs by the best strategy that fits (CONFIG=, NUM_GPUS=, NUM_NODES= NODE_RANK= MAIN_ADDRESS= MAIN_PORT=)
	@$(SFT_PLAY) train-distributed

train-deepspeed: $(READY) ## The same through DeepSpeed ZeRO-1, 2 or 3 (CONFIG=, DEEPSPEED_CONFIG=file.json)
	@$(SFT_PLAY) train-deepspeed

train-distributed-tb: $(READY) ## train-distributed with TensorBoard on http://localhost:6006 while it lives
	@$(SFT_PLAY) train-distributed-tb

train-deepspeed-tb: $(READY) ## train-deepspeed with TensorBoard on http://localhost:6006 while it lives
	@$(SFT_PLAY) train-deepspeed-tb

verify-resume: $(READY) ## Prove that a stopped run of this config goes on to the bit on this machine (CONFIG=, ARGS=--distributed)
	@$(SFT_PLAY) verify-resume

smoke: $(READY) ## Overfit one batch of your data, and say whether everything learns, ends and reloads (CONFIG=, ARGS="--steps 50")
	@$(SFT_PLAY) smoke

slurm: $(READY) ## Write an sbatch script that trains on several machines (CONFIG=, NUM_NODES=4)
	@$(SFT_PLAY) slurm

eval: $(READY) ## Loss, accuracy, answers of a result: RUN= SPLIT=test, or MODEL= ADAPTER= DATA=, or TASKS=; ARGS="--compare --generate"
	@$(SFT_PLAY) eval

infer: $(READY) ## Ask a model: RUN=runs/NAME or MODEL= ADAPTER=, ARGS='--prompt "..."' or --file or a chat
	@$(SFT_PLAY) infer

serve: $(READY) ## An OpenAI-compatible endpoint on http://127.0.0.1:8000, until Ctrl-C (RUN= or MODEL= ADAPTER=, PORT=)
	@$(SFT_PLAY) serve

chat: $(READY) ## Talk to what make serve serves: /new, /quit (RUN= starts it, URL= is elsewhere)
	@$(SFT_PLAY) chat

download: $(READY) ## Fetch a model once, sizes and licence first; later commands need no network (MODEL=owner/name or CONFIG=)
	@$(SFT_PLAY) download

merge: $(READY) ## Put a run's adapter into its base, and check it: RUN= or MODEL= ADAPTER=, ARGS="--dtype fp32 --output folder"
	@$(SFT_PLAY) merge

export: $(READY) ## A folder or file that others load, read back and compared (RUN=, FORMAT=safetensors or gguf, ARGS="--type q8_0 --ollama")
	@$(SFT_PLAY) export

push: $(READY) ## Upload a result to the hub, private unless told otherwise, after asking (RUN=, REPO=user/name, ARGS=--public)
	@$(SFT_PLAY) push

report: $(READY) ## One HTML file of a run, finished or not: curves, memory, answers, events, config (RUN=runs/NAME)
	@$(SFT_PLAY) report

compare: $(READY) ## Several runs over each other, the differences of their configs first (RUNS="runs/A runs/B")
	@$(SFT_PLAY) compare

runs: $(READY) ## Every run: state, model, method, loss, tokens/s, age, size (ARGS=--json)
	@$(SFT_PLAY) runs

clean-runs: $(READY) ## Remove runs after asking: RUNS="runs/A runs/B", ARGS=--failed, ARGS="--older-than 30d"
	@$(SFT_PLAY) clean-runs

tensorboard: $(READY) ## TensorBoard with all runs on http://localhost:6006, until Ctrl-C
	@$(SFT_PLAY) tensorboard

test: $(READY) ## Lint, type check and all tests but the long ones
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy && .venv/bin/pytest -n 2 --dist worksteal -m "not gpu and not slow and not fault and not demo"

test-faults: $(READY) ## Every fault of docs/reliability.md put into real runs, and what the program makes of it
	@.venv/bin/pytest -n 2 --dist worksteal -m "not slow" tests/faults tests/cli/test_verify_resume.py

test-all: $(READY) ## The long matrices too
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/mypy && .venv/bin/pytest -n 2 --dist worksteal -m "not demo"

soak: $(READY) ## Kill a tiny run at random moments and compare it with the straight one, to the bit (KILLS=200, SEED=0)
	@.venv/bin/python -m benchmarks.soak

bench: $(READY) ## Measure this machine beside plain trl: speed, MFU, memory, start; writes docs/benchmarks.md (ARGS="--cases lora --quick")
	@.venv/bin/python -m benchmarks.bench

bench-overhead: $(READY) ## Speed and memory beside a plain SFTTrainer script, side by side in one run
	@.venv/bin/python -m benchmarks.overhead

docs: $(READY) ## Regenerate docs/configuration.md, docs/errors.md, configs/schema.json, and what the presets say of their plans
	@.venv/bin/python -m sft_play.config.reference && .venv/bin/python -m sft_play.config.errors_page && .venv/bin/python -m sft_play.cli.presets
