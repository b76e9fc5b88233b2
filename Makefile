# Every target does its own set-up: the first run makes .venv and installs, later runs start at once.
# PYTHON=... picks the interpreter that .venv is made with; without it the first Python >= 3.12 found is taken.

.DEFAULT_GOAL := help
.NOTPARALLEL: # two installations into one .venv would trip over each other

VENV := .venv
RUN := $(VENV)/bin/python
BASE := $(VENV)/.installed-base
DEV := $(VENV)/.installed-dev
TRAIN := $(VENV)/.installed-train
SETUP := tools/make_venv.sh

MODEL ?= demo
PROMPT ?= ROMEO:
MAX_TOKENS ?= 128
ARGS ?=
ATTACKED := tests/serve tests/kv tests/engine/scheduling tests/text/test_hostile.py tests/lora/test_hostile_adapters.py \
    tests/weights/gguf/test_hostile.py tests/weights/test_hostile_folders.py
PROTOC := build/protos/.installed
FLEET := build/fleet/.installed
GENERATOR := grpcio-tools==1.71.2 setuptools<81

GPU_PLUGINS := build/gpu_plugins
DISASSEMBLER := nvidia-cuda-nvdisasm>=13,<14
OLDEST := build/oldest
OLDEST_JAX := $(shell sed -n 's/.*"jax>=\([0-9.]*\),.*/\1/p' pyproject.toml)

export PYTHON MODEL PROMPT # through the environment, so that quotes in them survive
# Images for containers often ask for no bytecode: then each of some hundred processes compiles all sources again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo serve bench-serve test test-slow test-devices test-interpreted test-fleet test-all attack fuzz chaos test-parity lint format types wheel protos protos-check sync-client train-demo train-adapters train-heads bench check-kernels check-oldest check-programs check-gpu clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(BASE): pyproject.toml $(SETUP)
	@$(SETUP) $(VENV) .
	@touch $@

$(DEV): pyproject.toml $(SETUP)
	@$(SETUP) $(VENV) '.[test,dev]'
	@touch $(BASE) $@

$(TRAIN): pyproject.toml $(SETUP)
	@$(SETUP) $(VENV) '.[train]'
	@touch $(BASE) $@

demo: $(BASE) ## generate text with the embedded model (PROMPT=... MAX_TOKENS=... MODEL=folder ARGS=...)
	@$(RUN) -m jaxinfer.generate --model "$$MODEL" --prompt "$$PROMPT" --max-tokens $(MAX_TOKENS) $(ARGS)

serve: $(BASE) ## serve the embedded model over gRPC and HTTP (docs/serving.md; ARGS="--model ...")
	@$(RUN) -m jaxinfer.serve --config configs/deployments/demo.yaml $(ARGS)

bench-serve: $(BASE) ## benchmark a server that runs here (docs/load_testing.md; ARGS=...)
	@$(RUN) -m jaxinfer.bench serve --target grpc://localhost:50051 $(ARGS)

test: $(DEV) ## run the fast tier of the tests (ARGS="tests/text -k emoji": selected tests of both tiers)
	@tools/test.sh host $(RUN) $(ARGS)

test-slow: $(DEV) ## run the slow tier (ARGS="tests/serve")
	@tools/test.sh slow $(RUN) $(ARGS)

test-devices: $(DEV) ## run the multi-device tests on eight CPU devices
	@tools/test.sh devices $(RUN) $(ARGS)

test-interpreted: $(DEV) ## run the tests of GPU kernels, interpreted on the CPU
	@tools/test.sh interpreted $(RUN) $(ARGS)

# Routers, proxies, Ray and clients: other people's programs, in an environment of their own behind which .venv lies.
$(FLEET): $(DEV) tests/fleet/requirements.txt tests/fleet/requirements_alone.txt
	@$(RUN) -m venv --clear build/fleet
	@$(RUN) -c "import sysconfig; print('import site; site.addsitedir(%r)' % sysconfig.get_path('purelib'))" \
	    >"$$(build/fleet/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/project.pth"
	@build/fleet/bin/python -m pip install --quiet --disable-pip-version-check -r tests/fleet/requirements.txt
	@build/fleet/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r tests/fleet/requirements_alone.txt
	@touch $@

test-fleet: $(FLEET) ## test third-party routers and proxies in front of replicas (docs/deploying.md; ARGS="tests/fleet -k ...")
	@build/fleet/bin/python -m pytest -m fleet $(or $(ARGS),tests/fleet)

test-all: test test-slow test-devices test-interpreted ## run the four tiers above (test-fleet and test-parity have other environments)

attack: $(DEV) ## run the attack tests of the server with fresh seeds (docs/security.md; ARGS="--seed 7")
	@$(RUN) -m pytest -n 2 --dist loadfile --fresh $(ATTACKED) $(ARGS)
	@$(RUN) -m tests.serve.attack chaos --seconds 30

fuzz: $(DEV) ## fuzz every API of a server; the corpus grows (ARGS="--cases 1000000")
	@$(RUN) -m tests.serve.attack fuzz $(ARGS)

chaos: $(DEV) ## inject random faults under load and report the outcome of each stream (ARGS="--seconds 600 --model demo")
	@$(RUN) -m tests.serve.attack chaos $(ARGS)

test-parity: $(DEV) ## compare live with transformers, in a separate environment (ARGS="-k ...")
	@$(RUN) -m pytest -m parity $(ARGS)

lint: $(DEV) ## ruff: rules and format; sizes, layers and words (tests/test_structure.py, tests/test_imports.py)
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m tools.gen_sync_client --check
	@$(RUN) -m pytest -q tests/test_structure.py tests/test_imports.py

format: $(DEV) ## fix and format with ruff
	@$(RUN) -m ruff check --fix .
	@$(RUN) -m ruff format .

types: $(DEV) ## check types with mypy
	@$(RUN) -m mypy

$(PROTOC): $(BASE) tools/gen_protos.py
	@$(RUN) -m venv --clear build/protos
	@build/protos/bin/python -m pip install --quiet --disable-pip-version-check $(foreach word,$(GENERATOR),"$(word)")
	@touch $@

protos: $(PROTOC) ## generate jaxinfer/protos/ from protos/
	@build/protos/bin/python -m tools.gen_protos

protos-check: $(PROTOC) ## check that jaxinfer/protos/ is up to date with protos/
	@build/protos/bin/python -m tools.gen_protos --check

sync-client: $(DEV) ## generate the blocking client (jaxinfer/client/sync.py) from the one for asyncio
	@$(RUN) -m tools.gen_sync_client

wheel: $(DEV) ## build the wheels in dist/: jaxinfer, and the client alone
	@rm -rf build/lib build/bdist.* dist
	@$(RUN) -m pip wheel . ./packaging/client --no-deps --quiet --wheel-dir dist
	@ls dist

train-demo: $(TRAIN) ## retrain the embedded models (docs/demo_model.md)
	@$(RUN) -m tools.train_demo $(ARGS)

train-adapters: $(TRAIN) ## retrain the embedded adapters (docs/demo_model.md)
	@$(RUN) -m tools.train_demo.adapters $(ARGS)

train-heads: $(TRAIN) ## retrain the embedded draft heads (docs/demo_model.md)
	@$(RUN) -m tools.train_heads $(ARGS)

bench: $(DEV) ## benchmark against other engines (benchmarks/vs_peers.py)
	@$(RUN) -m benchmarks.vs_peers $(ARGS)

# A folder of its own: in .venv, the plugin would make every start of JAX look for a GPU.
$(GPU_PLUGINS)/.installed: $(BASE)
	@rm -rf $(GPU_PLUGINS)
	@version=$$($(RUN) -c "import jaxlib; print(jaxlib.__version__)") && \
	$(RUN) -m pip install --quiet --disable-pip-version-check --no-deps --target $(GPU_PLUGINS) \
	    "jax-cuda13-plugin==$$version" "jax-cuda13-pjrt==$$version" "$(DISASSEMBLER)"
	@touch $@

# The oldest JAX that pyproject.toml admits, with its plugin for GPUs; all else lies behind it, in .venv.
$(OLDEST)/.installed: $(DEV)
	@$(RUN) -m venv --clear $(OLDEST)
	@$(RUN) -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	    >"$$($(OLDEST)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/project.pth"
	@$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps \
	    "jax==$(OLDEST_JAX)" "jaxlib==$(OLDEST_JAX)"
	@$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(OLDEST)/plugins \
	    "jax-cuda13-plugin==$(OLDEST_JAX)" "jax-cuda13-pjrt==$(OLDEST_JAX)" "$(DISASSEMBLER)"
	@touch $@

check-oldest: $(OLDEST)/.installed ## compile every kernel with the oldest supported JAX (ARGS="--every 4")
	@$(OLDEST)/bin/python -m pallas_kernels.check --plugins $(OLDEST)/plugins --target sm_90a sm_80 $(ARGS)

check-kernels: $(GPU_PLUGINS)/.installed ## compile every kernel without a GPU: registers, spills (docs/kernels.md)
	@$(RUN) -m pallas_kernels.check --target sm_90a sm_80 $(ARGS)

check-programs: $(GPU_PLUGINS)/.installed ## compile the engine's steps of an 8B shape for an H100, without a GPU
	@$(RUN) -m tools.check_programs $(ARGS)

check-gpu: $(BASE) ## check and benchmark this machine's GPU
	@$(RUN) -m jaxinfer.gpu_check $(ARGS)

clean: ## remove the outputs of builds and tests, except .venv
	@rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +
