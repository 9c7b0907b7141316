# Two commands do everything on a fresh machine: `make demo` and `make test`. They share one environment.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
# make TORCH_INDEX=https://... picks another wheel of torch than pip's default
TORCH_INDEX ?=
INDEX := $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))

.PHONY: install accelerator demo train demo-comfyui test test-full test-windows test-floors test-wheel test-machine-code test-farm test-image test-host test-full-host test-core core-classes core-doctor test-browser test-mutants fuzz inject crowd soak pictures cards workflows schemas locks matrix memory words lint bench gpu clean

install: $(READY)

$(READY): requirements.txt requirements-test.txt constraints.txt pyproject.toml
	@started=$$(date +%s); \
	test -x $(PY) || $(PYTHON) -m venv $(VENV); \
	$(PY) -m pip install --quiet --disable-pip-version-check $(INDEX) -c constraints.txt torch && \
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt "setuptools>=77" wheel -r requirements-test.txt && \
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e . && \
	touch $@ && echo "installed in $$(( $$(date +%s) - started )) s"

demo: $(READY)
	$(PY) -m anygpu.cli demo --output demo

# The models that ship in pipelines/demo/models, on one thread each time: hours. It goes on where it was interrupted.
train: $(READY)
	OMP_NUM_THREADS=1 $(PY) training/ltx_vae.py decoder
	OMP_NUM_THREADS=1 $(PY) training/ltx_vae.py encoder
	OMP_NUM_THREADS=1 $(PY) training/ltx.py train
	OMP_NUM_THREADS=1 $(PY) training/ltx.py export
	OMP_NUM_THREADS=1 $(PY) training/ltx.py lora
	OMP_NUM_THREADS=1 $(PY) training/ltx.py few
	OMP_NUM_THREADS=1 $(PY) training/hunyuan_vae.py
	OMP_NUM_THREADS=1 $(PY) training/hunyuan_video.py train
	OMP_NUM_THREADS=1 $(PY) training/hunyuan_video.py finish
	OMP_NUM_THREADS=1 $(PY) training/hunyuan_video.py export
	OMP_NUM_THREADS=1 $(PY) training/hunyuan_video_15.py train
	OMP_NUM_THREADS=1 $(PY) training/hunyuan_video_15.py export
	OMP_NUM_THREADS=1 $(PY) training/framepack.py train
	OMP_NUM_THREADS=1 $(PY) training/framepack.py finish
	OMP_NUM_THREADS=1 $(PY) training/framepack.py export
	OMP_NUM_THREADS=1 $(PY) training/mochi.py train
	OMP_NUM_THREADS=1 $(PY) training/mochi.py export
	OMP_NUM_THREADS=1 $(PY) training/hunyuan3d_paint.py train
	OMP_NUM_THREADS=1 $(PY) training/hunyuan3d_paint.py export
	OMP_NUM_THREADS=1 $(PY) training/mv_adapter.py train
	OMP_NUM_THREADS=1 $(PY) training/mv_adapter.py export

# Workers of the tests. One that crashes ends the run, and so does a test of more than TEST_SECONDS, with all its stacks.
TEST_SECONDS ?= 150
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
LIMITED := $(WORKERS) -o faulthandler_timeout=$(TEST_SECONDS) -o faulthandler_exit_on_timeout=true

# The simulated accelerator is compiled once per torch and source, where there is a compiler; tests build it otherwise.
accelerator: $(READY)
	@cd tests && ../$(PY) -c "from simulated import library; library.reason() or library.built()"

# Bytecode is kept between runs even where the environment says not to: each worker compiles 400 files otherwise.
test: $(READY) accelerator
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest $(LIMITED) -m "not full and not farm and not host and not browser and not machine"

test-full: $(READY) accelerator
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(PY) -m pytest $(WORKERS) -m "not farm and not host and not browser and not machine"

# The fast tests, with files that obey Windows' rules (tests/windows.py).
test-windows: $(READY) accelerator
	OMP_NUM_THREADS=1 $(PY) -m pytest $(LIMITED) --windows-rules -m "not full and not farm and not host and not browser and not machine"

# Every package at the oldest version that requirements.txt and the README allow, in an environment of its own.
FLOORS := .build/floors
FLOOR_TORCH := 2.8.0
FLOOR_TESTS := tests/compat/checkpoints tests/pipelines/files tests/pipelines/latents tests/pipelines/families \
	tests/paint tests/hostile tests/test_render.py
test-floors:
	@mkdir -p .build && sed 's/>=/==/' requirements.txt > .build/floors.txt
	test -x $(FLOORS)/bin/python || $(PYTHON) -m venv $(FLOORS)
	$(FLOORS)/bin/python -m pip install --quiet $(INDEX) torch==$(FLOOR_TORCH)
	$(FLOORS)/bin/python -m pip install --quiet "setuptools>=77" wheel "pytest>=8" aiohttp -r .build/floors.txt
	$(FLOORS)/bin/python -m pip install --quiet --no-deps --no-build-isolation -e .
	OMP_NUM_THREADS=1 $(FLOORS)/bin/python -m pytest -m "not full and not farm and not host and not browser and not machine" $(FLOOR_TESTS)

# The wheel with the farm, in an environment of its own, far from the tree: what a user runs, and what a worker imports.
WHEEL := .build/wheel
test-wheel:
	rm -rf $(WHEEL) build && $(PYTHON) -m venv $(WHEEL)
	$(WHEEL)/bin/python -m pip install --quiet $(INDEX) -c constraints.txt torch
	$(WHEEL)/bin/python -m pip install --quiet -c constraints.txt ".[farm]"
	cd $(WHEEL) && bin/anygpu report && bin/anygpu demo --output demo && bin/anygpu-farm --help
	cd $(WHEEL) && bin/python -c "import ray, anygpu.farm.worker, anygpu.farm.driver, anygpu.farm.gateway"

# The kernels, compiled for each kind of NVIDIA and AMD GPU and executed without one; then a row per operation, target
# and dtype. AMD's instructions are executed by tinygrad's emulator, of which a checkout is needed, and clang.
TINYGRAD ?= $(HOME)/tinygrad
export TINYGRAD
test-machine-code: $(READY)
	@cd tests && ../$(PY) -c "from machine_code import amd; reason = amd.lacks(); reason and print('AMD is skipped:', reason)"
	OMP_NUM_THREADS=1 $(PY) -m pytest $(WORKERS) -m machine tests/machine_code
	OMP_NUM_THREADS=1 $(PY) tests/machine_code/record.py

# Ray with two workers and two nodes on this machine; jobs whose workers, drivers and nodes are killed.
test-farm: $(READY)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .[farm] --no-build-isolation
	$(PY) -m pip install --quiet --disable-pip-version-check kubernetes-validate check-jsonschema  # schemas of recipes
	OMP_NUM_THREADS=1 $(PY) -m pytest $(WORKERS) -m farm tests/farm --ignore tests/farm/test_image.py

# The farm's image, built and given a job on two networks of this machine: root, buildah, debootstrap; 12 minutes.
test-image: $(READY)
	TORCH_INDEX=$(TORCH_INDEX) OMP_NUM_THREADS=1 $(PY) -m pytest -s -m farm tests/farm/test_image.py

# A thousand jobs on real Ray, 5 % of them poisoned in 20 ways, while workers, drivers and nodes are killed.
JOBS ?= 1000
crowd: $(READY)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .[farm] --no-build-isolation
	OMP_NUM_THREADS=1 $(PY) tests/farm/crowd.py --jobs $(JOBS) --seed $(SEED)

# Each worker has a ComfyUI of its own.
test-host: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m pytest $(WORKERS) -m "not full" tests/host

test-full-host: $(READY)
	OMP_NUM_THREADS=1 $(PY) -m pytest $(WORKERS) tests/host

# The tests of what core's own models are given, against any checkout: make test-core COMFYUI=~/ComfyUI
COMFYUI ?= $(or $(COMFYUI_PATH),~/comfy/ComfyUI)
test-core: $(READY)
	OMP_NUM_THREADS=1 $(PY) tests/host/core_page.py release $(COMFYUI)

# What Fit Model reaches in each class of core's, counted and measured anew; then the table of threads.
core-classes: $(READY)
	OMP_NUM_THREADS=1 $(PY) tests/host/core_page.py classes
	$(PY) tests/host/core_page.py threads

# 503 faults injected into core's models beside the Doctor, 168 of them finite, and 200 sound runs: two minutes.
core-doctor: $(READY)
	OMP_NUM_THREADS=1 $(PY) tests/host/core_page.py doctor

# The shortest script alone: it installs and builds what the others share. These go two at a time, the longest first.
BROWSER = $(addprefix browser-,searches memory templates run views windows paint)
test-browser: $(READY)
	$(PY) tests/browser/drive.py widgets.mjs
	$(MAKE) --keep-going --jobs 2 $(BROWSER)

$(BROWSER): browser-%:
	$(PY) tests/browser/drive.py $*.mjs $(if $(filter searches,$*),--every)

# Small faults, 60 in each room, and whether the nearest tests see them; it goes on where it was interrupted. Hours.
MUTANTS ?= 60
test-mutants: $(READY) accelerator
	$(PY) tests/mutants.py --count $(MUTANTS)

# Every reader on files that are nearly right, with budgets of memory and time; then, with atheris, guided by coverage.
SECONDS ?= 600
SEED ?= 0
fuzz: $(READY)
	OMP_NUM_THREADS=1 $(PY) tests/fuzz/structured.py --seconds $(SECONDS) --seed $(SEED)
	@mkdir -p .build/corpus
	if $(PY) -c "import atheris" 2>/dev/null; then $(PY) tests/fuzz/readers.py .build/corpus tests/fixtures/fuzz -max_total_time=$(SECONDS) -max_len=4096; fi

# A shortage, a lost device or an interrupt at any operator or allocation, and the run after it; goes on where it stopped.
COUNT ?= 10000
inject: $(READY) accelerator
	OMP_NUM_THREADS=1 $(PY) tests/runs/injections.py --count $(COUNT) --seed $(SEED)

# Mixed work in a real ComfyUI, whose memory, threads and files are written into benchmarks/results/soak.csv.
HOURS ?= 1
soak: $(READY)
	OMP_NUM_THREADS=1 $(PY) tests/host/soak.py --hours $(HOURS) --seed $(SEED)

# Each node's schema as users' workflows hold it, where a change is meant.
schemas: $(READY)
	$(PY) tests/schemas.py

pictures: $(READY)
	$(PY) tests/browser/drive.py run.mjs --classic --pictures
	$(PY) tests/browser/drive.py memory.mjs --classic --pictures
	$(PY) tests/browser/drive.py help.mjs

workflows: $(READY)
	$(PY) tests/browser/drive.py author.mjs
	$(PY) tests/browser/drive.py workflows.mjs
	$(MAKE) cards
	$(PY) tests/browser/drive.py subgraphs.mjs

# Thumbnails of the workflows and the README's moving picture, with what the demo model draws now.
cards: $(READY)
	OMP_NUM_THREADS=1 $(PY) tests/browser/cards.py

# Every package at one version, for cards that newer builds of torch leave.
locks: $(READY)
	$(PY) tests/locks.py

matrix: $(READY)
	OMP_NUM_THREADS=1 $(PY) tests/simulated/matrix_page.py

# The lists of inputs on the help pages, from the schemas; then the words of each page.
words: $(READY)
	$(PY) tests/help_pages.py
	$(PY) tests/capabilities_page.py
	$(PY) tests/words.py

BENCH := OMP_NUM_THREADS=1 $(PY) benchmarks/runner.py
GPU_PYTHON ?= $(if $(wildcard $(PY)),$(PY),$(PYTHON))
memory: $(READY) accelerator
	for case in memory_fits memory memory_peers memory_decode memory_host; do $(BENCH) $$case --write || exit 1; done

demo-comfyui: $(READY)
	$(PY) tests/host/demo.py demo/comfyui

# Each case by itself: python benchmarks/runner.py
CASES := minutes stored_products kernels_bytes kernels_build growth peers
bench: $(READY) accelerator
	for case in $(CASES); do $(BENCH) $$case --write || exit 1; done

# What this GPU is and can do, in ten minutes, offline; torch is enough. It goes on where it was interrupted.
gpu:
	$(GPU_PYTHON) cli.py prove

lint: $(READY)
	$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m mypy --explicit-package-bases compat pipelines

clean:
	rm -rf $(VENV) .build demo build *.egg-info
