# Every command of the project. `make` lists them; each one sets up what it needs first, once.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := $(CURDIR)/.venv
PYTHON := $(VENV)/bin/python
EXTENSION := python/shardwright/_core.abi3.so
# There while the extension in place is the optimised one, and newer than the sources.
OPTIMISED := target/optimised
RUST_SOURCES := $(shell find crates -name '*.rs' -o -name Cargo.toml) Cargo.toml Cargo.lock rust-toolchain.toml
LOCK := requirements/development.txt
# Rust tools that the commands below need.
TOOLS := .cache/tools/bin
CARGO := $(shell command -v cargo)
GPU_PACK := target/gpu-pack
BENCH_VENV := $(CURDIR)/.cache/bench-communication
SITE_VENV := $(CURDIR)/.cache/site
STACKS_VENV := $(CURDIR)/.cache/stacks

# The extension is built against the environment's own Python and without libpython; tests and lints are built the same
# way, so nothing builds twice.
export PYO3_PYTHON := $(PYTHON)
export PYO3_BUILD_EXTENSION_MODULE := 1
export PYTHONPATH := $(CURDIR)/python
export TOKENIZERS_PARALLELISM := false
# Where this is set, every process compiles all of torch and the package anew: four seconds each.
unexport PYTHONDONTWRITEBYTECODE

RANKS ?= 2
PP ?= $(if $(filter 1,$(RANKS)),1,2)
ARGS ?=

.PHONY: help setup build optimised train test test-all test-torn test-elastic trainers mutants check-concurrency test-rust test-python parity parity-tp parity-memory test-checkpoint programs zoo zoo-schedules convergence t5-11b delayed-30b paper lint fuzz format test-compat compat bench-overhead bench-start bench-comm bench-comm-idle bench-call bench-pipeline bench-dynamic bench-gpt2 bench-memory bench-tp bench-ncf bench-trace bench-checkpoint timeline rehearse faults attack soak stacks stress gpu-test gpu-pack gpu-day gpu-rehearse wheel docs site stub lock clean first-minutes

help: ## list the commands
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.complete $(EXTENSION) ## build the Python environment and the extension, unless they are up to date

build: $(EXTENSION) ## build the extension, unless it is up to date

$(VENV)/.complete: $(LOCK) tools/environment.sh
	@tools/environment.sh $(VENV) $(LOCK)
	@touch $@

$(EXTENSION): $(RUST_SOURCES) tools/build.sh | $(VENV)/.complete
	@rm -f $(OPTIMISED)
	@tools/build.sh $@ dev

optimised: $(OPTIMISED) ## build the extension as optimised as wheels have it, which is what benchmarks measure

$(OPTIMISED): $(RUST_SOURCES) tools/build.sh | $(VENV)/.complete
	@tools/build.sh $(EXTENSION) release
	@touch $@

train: setup ## train the example: RANKS=2 processes, pipeline degree PP=2, ARGS="..." for the script
	@tools/train.sh $(RANKS) $(PP) $(ARGS)

test: setup ## every test a change must pass, in minutes: Rust, Python, a choice of parity with one process
	@$(PYTHON) -m tests $(ARGS)

test-all: setup ## all tests, with whole parity tables and other versions of torch; ARGS="--repeat 20 tests/failures" instead
	@$(PYTHON) -m tests --all $(ARGS)
	@$(if $(ARGS),,tools/compatibility.sh >&2)

mutants: setup ## plant twenty faults one at a time: each has to be caught by what `make test` runs; ARGS="AREA" for some
	@$(PYTHON) -m tests.mutants $(ARGS)

test-rust: setup
	cargo test --workspace --quiet

test-python: setup
	$(PYTHON) -m pytest --quiet -n2 --dist=loadfile --no-loadscope-reorder

parity: setup ## compare split models with one process, gradient by gradient; ARGS="..." chooses cases
	@$(PYTHON) -m tests.parity $(ARGS)

parity-tp: setup ## the same for tensor parallelism, with pipelines and data parallelism; ARGS="--only ..." chooses
	@$(PYTHON) -m tests.parity_tp $(ARGS)

parity-memory: setup ## the same for features that save memory: checkpointing; ARGS="..." chooses cases
	@$(PYTHON) -m tests.parity_memory $(ARGS)

test-checkpoint: setup ## save under every layout of ranks and go on under every other, held against one process; ARGS="..." chooses pairs
	@OMP_NUM_THREADS=1 $(PYTHON) -m tests.checkpoint.layouts $(ARGS)

programs: setup ## 5,000 random programs beside plain PyTorch, two at once; ARGS="--count N --start SEED --processes-share X"
	@OMP_NUM_THREADS=1 $(PYTHON) -m tests.programs $(ARGS)

faults: setup ## every fault in every layout of ranks at every moment: each named, none hangs, the next step exact; ARGS="..." chooses
	@$(PYTHON) -m tests.faults $(ARGS)

test-torn: setup ## 200 kills and full disks while two ranks save, and damaged files: no checkpoint torn, no damage unnoticed
	@OMP_NUM_THREADS=1 $(PYTHON) -m tests.torn $(ARGS)

test-elastic: setup ## four ranks under torchrun, one killed and not replaced: the others go on as if resharded by hand
	@OMP_NUM_THREADS=1 $(PYTHON) -m tests.elastic $(ARGS)

compat: setup ## scripts for the original library by its import path, beside plain PyTorch, and every key and argument of its interface; ARGS="..." chooses
	@OMP_NUM_THREADS=1 $(PYTHON) -m tests.compat $(ARGS)

trainers: setup ## train by the trainers of other libraries over ranks, beside their plain use in one process; ARGS="..." chooses
	@OMP_NUM_THREADS=1 $(PYTHON) -m tests.trainers $(ARGS)

stacks: setup $(STACKS_VENV)/.complete ## train by the trainers of TRL over ranks, beside one plain process; ARGS="--only PATTERN"
	@OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(STACKS_VENV)/bin/python -m tests.stacks $(ARGS)

$(STACKS_VENV)/.complete: requirements/stacks.txt tools/environment.sh
	@tools/environment.sh $(STACKS_VENV) $<
	@touch $@

convergence: setup ## train one model over several degrees: the loss curves have to lie on one another
	@$(PYTHON) -m tests.convergence --picture docs/images/convergence.svg $(ARGS)

check-concurrency: $(VENV)/.complete ## threads under chosen orders, raw memory under a sanitizer; ARGS=--faults plants a fault for each law
	@$(PYTHON) -m tests.concurrency $(ARGS)

zoo: setup ## train every model of the zoo over several ranks; writes docs/zoo.md; ARGS="..." chooses models
	@$(PYTHON) -m tests.zoo $(ARGS)

zoo-schedules: setup ## train half of the zoo under every schedule; ARGS="..." chooses models or cases
	@$(PYTHON) -m tests.zoo.schedules $(ARGS)

t5-11b: setup ## divide T5-11B over 8 ranks on the meta device, with assumed lengths, beside the paper's tables
	@$(PYTHON) -m tests.t5_11b

delayed-30b: setup ## create, trace and divide a GPT-2 of 30 billion parameters, whose weights are never made
	@OMP_NUM_THREADS=1 $(PYTHON) -m tests.delayed_30b

paper: setup ## train two steps of the paper's large configurations, reduced in width and depth; ARGS="--only NAME"
	@OMP_NUM_THREADS=1 $(PYTHON) -m tests.paper $(ARGS)

lint: setup $(TOOLS)/cargo-deny $(TOOLS)/pyo3-introspection ## formatting, lints, types, stub, licences and sources of dependencies, file lengths
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked --quiet -- -D warnings
	cargo clippy -p shardwright-py --locked --quiet -- -D warnings # as wheels have it, without the faults of tests
	cargo clippy -p shardwright-buffers -p shardwright-ucx -p shardwright-comm -p shardwright-offload -p shardwright-runtime --features shardwright-comm/shuttle,shardwright-offload/shuttle,shardwright-runtime/shuttle --lib --tests --locked --quiet -- -D warnings
	$(PYTHON) -m ruff check --quiet
	$(PYTHON) -m ruff format --check --quiet
	$(PYTHON) -m mypy --no-error-summary
	@said=$$($(VENV)/bin/lint-imports --cache-dir .cache/import-linter 2>&1) || { echo "$$said" >&2; exit 1; }
	tools/stub.sh --check
	$(TOOLS)/cargo-deny --log-level error check bans licenses sources
	$(PYTHON) tools/file_lengths.py

$(TOOLS)/cargo-deny:
	@tools/cargo_tool.sh .cache/tools cargo-deny 0.20.2 --no-default-features

$(TOOLS)/cargo-fuzz:
	@tools/cargo_tool.sh .cache/tools cargo-fuzz 0.13.2

$(TOOLS)/pyo3-introspection:
	@tools/cargo_tool.sh .cache/tools pyo3-introspection 0.30.1

fuzz: $(TOOLS)/cargo-fuzz ## let the fuzzer try what reads from sockets; ARGS="--seconds 60" for each target
	@PATH="$(CURDIR)/.cache/tools/bin:$$PATH" python3 tools/fuzz.py $(ARGS)

format: setup ## format Rust and Python
	cargo fmt --all
	$(PYTHON) -m ruff check --fix --quiet
	$(PYTHON) -m ruff format --quiet

test-compat: setup ## the Python tests with the oldest and the newest supported torch
	@tools/compatibility.sh

bench-overhead: optimised ## what one rank costs over plain PyTorch
	@OMP_NUM_THREADS=1 $(PYTHON) -m benches.overhead $(ARGS)

bench-start: optimised ## imports, smp.init of two ranks, and the first step beside plain PyTorch's
	@OMP_NUM_THREADS=1 $(PYTHON) -m benches.start $(ARGS)

bench-comm: optimised $(BENCH_VENV)/.complete ## messages between two processes, beside Gloo, Open MPI and UCX's own test
	@OMP_NUM_THREADS=1 $(PYTHON) -m benches.communication --environment $(BENCH_VENV) $(ARGS)

bench-comm-idle: optimised ## what communication takes from a rank that computes
	@OMP_NUM_THREADS=1 $(PYTHON) -m benches.communication.idle $(ARGS)

bench-call: optimised ## the round trip of a module on another rank that does nothing, and where its time goes
	@OMP_NUM_THREADS=1 $(PYTHON) -m benches.call $(ARGS)

bench-generate: optimised ## tokens per second over two ranks beside one process, and what caches hold
	@OMP_NUM_THREADS=1 $(PYTHON) -m benches.generate $(ARGS)

bench-trace: optimised ## what smp.trace costs: steps with the trace on and off in turns
	@OMP_NUM_THREADS=1 $(PYTHON) -m benches.tracing $(ARGS)

timeline: optimised ## a step of GPT-2 on 4 ranks with 16 microbatches, drawn to docs/images/gpt2_timeline.svg
	@OMP_NUM_THREADS=1 $(PYTHON) -m torch.distributed.run --standalone --nproc-per-node 4 examples/gpt2_timeline.py out/gpt2 $(ARGS)
	@$(PYTHON) -m shardwright.command trace show out/gpt2
	@$(PYTHON) -m shardwright.command trace draw out/gpt2 > docs/images/gpt2_timeline.svg

bench-pipeline: optimised ## stages that sleep, beside torch.distributed.pipelining: how much of each schedule's ideal
	@OMP_NUM_THREADS=1 $(PYTHON) -m benches.pipeline $(ARGS)

bench-dynamic: optimised ## T5, ALBERT and a mixture of experts in dynamic mode, beside static mode
	@OMP_NUM_THREADS=1 $(PYTHON) -m benches.dynamic $(ARGS)

bench-gpt2: optimised ## a GPT-2's training step on two ranks, beside one process, DDP and torch's pipelines
	@OMP_NUM_THREADS=1 $(PYTHON) -m benches.gpt2 $(ARGS)

bench-memory: optimised ## peak memory and time of a GPT-2's training step with each feature that saves memory, beside torch's
	@OMP_NUM_THREADS=1 $(PYTHON) -m benches.memory $(ARGS)

bench-tp: optimised ## a GPT-2's training step over two tp ranks, beside DTensor and Megatron's split by hand
	@OMP_NUM_THREADS=1 $(PYTHON) -m benches.tensor_parallel $(ARGS)

bench-ncf: optimised ## collaborative filtering with divided tables, beside the same batch on both ranks, one process, DDP
	@OMP_NUM_THREADS=1 $(PYTHON) -m benches.ncf $(ARGS)

bench-checkpoint: optimised ## save and load 2 GiB beside torch.save, torch.distributed.checkpoint and a plain copy
	@OMP_NUM_THREADS=1 $(PYTHON) -m benches.checkpoint $(ARGS)

$(BENCH_VENV)/.complete: requirements/bench.txt tools/environment.sh
	@tools/environment.sh $(BENCH_VENV) $<
	@touch $@

rehearse: setup ## train over four hosts that are network namespaces, over slow links and cut ones (as root)
	@$(PYTHON) -m pytest --quiet -m slow tests/hosts $(ARGS)

soak: setup ## 200 jobs in the same processes, and 2,000 steps of which 200 fail: nothing may be left behind
	@$(PYTHON) -m tests.soak $(ARGS)

attack: setup ## unknown peers and hostile members against running jobs; ARGS="--only ucx" for some
	@OMP_NUM_THREADS=1 $(PYTHON) -m tests.attack $(ARGS)

stress: optimised ## many messages among four processes, and fifty kills; ARGS="--minutes 10" for the long form
	@OMP_NUM_THREADS=1 $(PYTHON) -m tests.comm.stress $(ARGS)

# On a machine without cargo, these two use what gpu-pack has built.
gpu-test: $(if $(CARGO),setup) ## the tests and measurements that need a CUDA device
ifneq ($(CARGO),)
	@$(PYTHON) -c "import sys, torch; sys.exit(None if torch.cuda.is_available() else 'gpu-test: there is no CUDA device')"
	@$(PYTHON) -m pytest --quiet -m gpu
	@$(PYTHON) -m benches.overhead --device cuda $(ARGS)
else
	@sh $(GPU_PACK)/run --only gpu_tests $(ARGS)
endif

gpu-day: $(if $(CARGO),setup) ## all that only a CUDA device can show, in eight minutes; ARGS="--only STEP,..." for some
	@$(if $(CARGO),$(PYTHON) -m tools.gpu_day,sh $(GPU_PACK)/run) $(ARGS)

gpu-pack: setup ## what a GPU machine without cargo gets to run gpu-day; prints its size and the command to run there
	@$(PYTHON) -m tools.gpu_day.pack --into $(GPU_PACK) $(ARGS)

gpu-rehearse: setup ## the steps of gpu-day with tiny sizes on the CPU and on a stand-in for CUDA's driver
	@TINY=1 OMP_NUM_THREADS=1 $(PYTHON) -m tools.gpu_day --device cpu --folder out/gpu_rehearsal $(ARGS)

wheel: setup ## build the wheels, install them into an empty environment and train with them
	@tools/wheel.sh

first-minutes: setup ## from the wheel, in an empty directory: install, a script, a notebook; writes docs/guide/first-minutes.md
	@tools/first_minutes.sh

docs: setup ## run the examples of the documentation and check its links
	$(PYTHON) -m pytest --quiet tests/docs

site: setup $(SITE_VENV)/.complete ## build the documentation as a site into target/site, and check every link in it
	@$(SITE_VENV)/bin/python tools/documentation_site.py target/site

$(SITE_VENV)/.complete: requirements/site.txt tools/environment.sh
	@tools/environment.sh $(SITE_VENV) $<
	@touch $@

stub: setup $(TOOLS)/pyo3-introspection ## write the extension's stub from its signatures
	@tools/stub.sh

lock: $(VENV)/.complete ## write the pinned requirements anew, keeping versions that still fit
	@tools/lock.sh

clean: ## remove what the commands made
	rm -rf .venv .cache target dist out $(EXTENSION)
