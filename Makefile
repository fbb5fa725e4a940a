# `make help` lists the targets. Each does the set-up it needs; a second run reuses it.
SHELL := bash
.DEFAULT_GOAL := help
# Container images often set it. Tests start hundreds of Pythons: with kept bytecode torch is imported
# in half of the time, the router in a third, and the next run collects the tests faster.
unexport PYTHONDONTWRITEBYTECODE
BIN := .venv/bin
PACKAGES := core kv_transfer router worker_image operator tools
PY_PATHS := $(PACKAGES) tests bench examples scripts hatch_build.py
PYTEST := $(BIN)/python -m pytest
PYTEST_ARGS ?=
MUTATE_ARGS ?=
# Processes that share the tests, a file's in one; 0: one after another in pytest's own, for a debugger.
WORKERS ?= 2
# Files go to the workers in the order of tests/conftest.py.
IN_PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Seconds that one test may take, with its fixtures: one that hangs fails with the stacks of its threads, and the others
# go on. Where no signal can end it, the stacks are printed. Those with real vLLM and the soaks have no deadline.
DEADLINE := --timeout 900 --timeout-method signal -o faulthandler_timeout=930
HERE := not gpu and not cluster and not vllm and not agents and not soak
# A machine with a GPU has its own Python with torch, triton, numpy, pytest and msgspec, and perhaps
# no network: nothing is installed there, and these tests import nothing else.
GPU_PYTHON ?= python3
ON_GPU := PYTHONPATH=.:core:kv_transfer:worker_image $(GPU_PYTHON)
# Where tests may be marked `cluster`: to collect the others takes half a minute.
CLUSTER_TESTS := tests/cluster tests/crds tests/images
GPU_TESTS := tests/gpu tests/kv/test_device_gpu.py tests/kv/test_transport_conformance.py tests/kv/test_vllm_gpu.py

.PHONY: help setup fmt lint type imports generate verify test test-slow test-all collect test-gpu test-cluster test-vllm test-agents soak demo journeys mutate bench-operator bench-gpu bench-kv bench-engine bench-router bench-parallel bench-fleet bench-vllm bench-agents bench-change cluster-build cluster-images cluster-up cluster-down cluster-status images push constraints clean check-chart

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Virtual environment and dependencies (the other targets call it)
	@scripts/setup.sh

fmt: setup ## Format the code and fix what ruff can fix
	$(BIN)/ruff format $(PY_PATHS)
	$(BIN)/ruff check --fix $(PY_PATHS)

lint: setup ## ruff: format and rules
	$(BIN)/ruff format --check $(PY_PATHS)
	$(BIN)/ruff check $(PY_PATHS)

type: setup ## pyright, strict
	$(BIN)/pyright

imports: setup ## import-linter: who may import whom
	$(BIN)/lint-imports

generate: setup ## Write the CRDs, the API reference and the router's OpenAPI document from the code
	@$(BIN)/python scripts/generate.py

verify: lint type imports test ## All checks, and `make test`

test: setup ## The quick tests: no root, Go, GPU or cluster, minutes
	$(PYTEST) -q $(IN_PARALLEL) $(DEADLINE) -m "$(HERE) and not slow" --durations=10 $(PYTEST_ARGS)

test-slow: setup ## The tests that take more than 5 s each, most with real engines
	$(PYTEST) -q $(IN_PARALLEL) $(DEADLINE) -m "$(HERE) and slow" --durations=10 $(PYTEST_ARGS)

test-all: setup ## Both, in one run
	$(PYTEST) -q $(IN_PARALLEL) $(DEADLINE) -m "$(HERE)" --durations=25 $(PYTEST_ARGS)

collect: setup ## Import all tests, which compiles them: the runs behind it start in half of the time
	@$(PYTEST) -qq --collect-only

test-gpu: ## The tests that need a CUDA device, by that machine's GPU_PYTHON (docs/gpu.md)
	$(ON_GPU) -m pytest $(GPU_TESTS) -m "gpu and not soak" --durations=10 $(PYTEST_ARGS)

test-cluster: setup ## The tests on a real Kubernetes; needs root, Go and Debian's packages
	$(PYTEST) $(CLUSTER_TESTS) $(DEADLINE) -m "cluster and not soak$(if $(ONLY), and $(ONLY))" --durations=25 $(PYTEST_ARGS)

test-vllm: setup ## One real vLLM as P and one as D, on the CPU; makes their environment (6 GB, once)
	@$(BIN)/python scripts/vllm_environment.py > /dev/null
	$(PYTEST) -q tests/kv -m "vllm and not soak" --durations=10 $(PYTEST_ARGS)

cluster-build: setup ## Build the test cluster's programs into the cache (minutes, once)
	@$(BIN)/python -m tests.cluster.harness build

cluster-images: setup ## Build the images that its node runs, where sources changed (a minute)
	@$(BIN)/python -m tests.cluster.images.build

cluster-up: setup ## Start a Kubernetes on this machine; NODE=1: with a node that runs pods
	@$(BIN)/python -m tests.cluster.harness up $(if $(NODE),--node)

cluster-down: setup ## End it
	@$(BIN)/python -m tests.cluster.harness down

cluster-status: setup ## What runs, and how to use it
	@$(BIN)/python -m tests.cluster.harness status

images: ## Build the images; make images push REGISTRY=... also pushes (scripts/images.sh --help)
	@scripts/images.sh build $(filter push,$(MAKECMDGOALS))

push: images ## With `images`: push them too, to REGISTRY=...

test-agents: setup ## Others' suites and clients of agents' APIs against one P and one D; installs them (340 MB, once)
	@$(BIN)/python scripts/agent_suites.py > /dev/null
	$(PYTEST) -q tests/agents $(DEADLINE) -m agents --durations=10 $(PYTEST_ARGS)

soak: setup ## The long forms of the load tests
	$(PYTEST) -m soak --durations=10 $(PYTEST_ARGS)

demo: setup ## Bring up 1 prefill + 3 decode engines, ask them things, check the answers
	@$(BIN)/python -m examples.demo.demo

journeys: setup ## Trace four journeys and write their files into docs/architecture.md
	@$(BIN)/python -m tests.journeys --write

mutate: setup ## Change the product in 60 small ways; which test notices? (MUTATE_ARGS="--seed 2 --count 9")
	@$(BIN)/python scripts/mutate.py $(MUTATE_ARGS)

check-chart: setup ## What checkov says of the rendered chart; 98 % of its checks must pass
	@PYTHONPATH=. $(BIN)/python scripts/check_chart.py

bench-operator: setup ## A thousand pods, a hundred fleets, five hundred at rest; against plain objects
	@$(BIN)/python -m bench.operator

bench-gpu: ## The GPU path's kernels against torch's own, by GPU_PYTHON
	@$(ON_GPU) -m bench.gpu

bench-kv: setup ## How fast KV moves from process to process; against plain TCP, gloo, nixl, mooncake
	@$(BIN)/python -m bench.kv

bench-engine: setup ## How fast the engine answers on the CPU; against vLLM and transformers
	@$(BIN)/python -m bench.engine

bench-router: setup ## What the router costs; against vllm-router and SMG
	@$(BIN)/python -m bench.router

bench-parallel: setup ## What tensor and pipeline parallelism cost and bring; all-reduce against Gloo
	@$(BIN)/python -m bench.parallel

bench-fleet: setup ## What P and D apart bring, and where they do not pay; against the same engines aggregated
	@$(BIN)/python -m bench.fleet

bench-vllm: setup ## Our connector inside vLLM; against NixlConnector and a vLLM that computes the prompt again
	@$(BIN)/python -m bench.vllm

bench-agents: setup ## What structured output and the APIs of agents cost; against vLLM
	@$(BIN)/python -m bench.agents

bench-change: setup ## 10,000 requests while a fleet in a cluster is changed in every way; needs what NODE=1 does
	@$(BIN)/python -m bench.change

constraints: setup ## Write the installed versions to constraints.txt
	@scripts/constraints.sh

clean: ## Remove the virtual environment and caches in the tree
	rm -rf .venv .pytest_cache .ruff_cache .import_linter_cache .hypothesis
