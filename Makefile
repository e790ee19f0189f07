# make install | train | profile | lint | quick | test | test-all | models | matrix | smoke | clean
#
# Python comes from the active virtual environment, else from .venv, made here. Whatever torch is there already is kept:
# `pip` gets it as a constraint, and fails rather than exchange it.

VENV := $(or $(VIRTUAL_ENV),$(CURDIR)/.venv)
PYTHON := $(VENV)/bin/python
STAMP := build/installed$(subst /,-,$(VENV))
CONSTRAINTS := build/constraints.txt
EXTENSION := build/extension$(subst /,-,$(VENV))
# torch imports installed extensions when it is imported. Here it must not: an editable install whose modules have moved
# since would end the build that is to mend it.
ALONE := TORCH_DEVICE_BACKEND_AUTOLOAD=0
PIP := $(ALONE) $(PYTHON) -m pip install --quiet --disable-pip-version-check

# Further flags of what is run, as in `make train ARGS="--engine fsdp2 --steps 100"`.
ARGS ?=

.PHONY: install train profile lint quick test test-all models matrix smoke clean

install: $(STAMP) $(EXTENSION)

$(CURDIR)/.venv/pyvenv.cfg:
	if python3 -c 'import torch' 2>/dev/null; then share=--system-site-packages; fi; \
	python3 -m venv $$share $(CURDIR)/.venv

$(STAMP): setup.py pyproject.toml requirements-dev.txt $(VENV)/pyvenv.cfg
	mkdir -p build
	$(ALONE) $(PYTHON) -c 'import torch' 2>/dev/null || $(PIP) $$(grep '^torch==' requirements-dev.txt)
	$(ALONE) $(PYTHON) -c 'from importlib.metadata import version; print("torch==" + version("torch"))' > $(CONSTRAINTS)
	grep -v '^torch==\|^deepspeed==\|^PySide6' requirements-dev.txt > build/requirements.txt
	$(PIP) -c $(CONSTRAINTS) -r build/requirements.txt
	DS_BUILD_OPS=0 $(PIP) -c $(CONSTRAINTS) --no-build-isolation $$(grep '^deepspeed==' requirements-dev.txt)
	ZCOMPILE_EXTENSION=0 $(PIP) -c $(CONSTRAINTS) --no-build-isolation -e '.[train,profile]'
	touch $@

# In place and not by pip, which would compile all files in a new folder each time: ninja compiles those that changed.
$(EXTENSION): $(STAMP) $(shell find csrc -type f)
	$(ALONE) $(PYTHON) setup.py --quiet build_ext --inplace > build/extension.log || { cat build/extension.log; exit 1; }
	touch $@

# All GPUs, or two CPU ranks of one thread each: about three minutes on two cores.
train: install
	gpus=$$($(PYTHON) -c 'import torch; print(torch.cuda.device_count())'); \
	ranks=$$((gpus ? gpus : 2)); \
	OMP_NUM_THREADS=1 $(PYTHON) -m torch.distributed.run --standalone --nproc-per-node $$ranks \
		examples/train.py --batch $$((32 * (gpus ? gpus : 1))) $(ARGS)

# A report in out/profile, over all GPUs or two CPU ranks.
profile: install
	OMP_NUM_THREADS=1 $(PYTHON) -m zcompile profile --engines zcompile,limit,eager,fsdp2,zero3 $(ARGS)

# Style, types and formatting; nothing is run.
lint: install
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
	find csrc -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' | \
		xargs $(VENV)/bin/clang-format --dry-run --Werror

# Unit tests: no ranks, no compiler.
quick: install
	OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -n 2 tests/unit $(ARGS)

# One case of each property, as CI runs them: some 20 minutes on two cores. On a CPU two files at a time, because a
# file's ranks also wait: for one another, for time limits and for compilers. Tests on GPUs want them to themselves.
PYTEST = OMP_NUM_THREADS=1 $(PYTHON) -m pytest --dist loadfile --no-loadscope-reorder \
	-n $$($(PYTHON) -c 'import torch; print(0 if torch.cuda.is_available() else 2)')

test: install
	$(PYTEST) -m "not slow" $(ARGS)

# Every test but those on demand, with a browser for the profiler's report; about an hour.
test-all: install
	grep '^PySide6' requirements-dev.txt > build/browser.txt
	$(PIP) -c $(CONSTRAINTS) -r build/browser.txt
	$(PYTEST) $(ARGS)

# Every model of transformers that can be made small, and some of diffusers', beside itself unsharded: two hours on two
# cores. `make models TASKS=images` takes one task. The last table is in docs/lab/measurements.md.
TASKS := causal masked seq2seq images segmentation ctc speech audio vision-language diffusion

models: install
	for task in $(TASKS); do \
		ZCOMPILE_ARCHITECTURES=$$task OMP_NUM_THREADS=1 \
			$(PYTHON) -m pytest -q -n 2 tests/distributed/test_architectures.py $(ARGS) || exit; \
	done

# What touches torch's internals, with each torch that is supported: `make matrix TORCH=2.15.0` takes one version.
# MATRIX_ENVS is a folder with environments named after versions, whose torch is used.
MATRIX := python3 tests/matrix.py $(addprefix --torch ,$(TORCH)) $(addprefix --environments ,$(MATRIX_ENVS))

matrix:
	$(MATRIX) $(ARGS)

# A handful of tests with one torch: `make smoke TORCH=2.15.0`.
smoke:
	$(MATRIX) --smoke -m "not slow" $(ARGS)

clean:
	rm -rf build out .pytest_cache .mypy_cache .ruff_cache *.egg-info zcompile/_C.*.so

# The runtime under AddressSanitizer: a copy of this source in build/asan, with an extension of its own, and the tests
# that free, raise and outlive most. Python and torch are not instrumented, so containers that they share are not looked
# at, nor leaks, which Python has at its end. Ten minutes to build on two cores.
.PHONY: asan
ASAN := build/asan
ASAN_TESTS := $(addprefix tests/distributed/test_,training.py accumulate.py lifetimes.py freeing.py lost_writes.py \
	gather_counts.py sharing.py failures.py) $(wildcard tests/distributed/test_chaos.py)
ASAN_LIBRARIES = $(shell g++ -print-file-name=libasan.so) $(shell g++ -print-file-name=libstdc++.so)
ASAN_OPTIONS := detect_leaks=0:detect_container_overflow=0:detect_odr_violation=0:protect_shadow_gap=0
ASAN_OPTIONS := $(ASAN_OPTIONS):quarantine_size_mb=1
asan: install
	$(call build_copy,$(ASAN),address)
	cd $(ASAN) && LD_PRELOAD="$(ASAN_LIBRARIES)" ASAN_OPTIONS=$(ASAN_OPTIONS) OMP_NUM_THREADS=1 \
		$(PYTHON) -m pytest -p no:cacheprovider -m "not slow" $(ASAN_TESTS) $(ARGS)

# The same under ThreadSanitizer, for a minute on two ranks. Only accesses of the runtime count, since torch's gloo has
# races of its own. Reports are printed.
.PHONY: tsan
TSAN := build/tsan
TSAN_OPTIONS := ignore_noninstrumented_modules=1:history_size=5
tsan: install
	$(call build_copy,$(TSAN),thread)
	cd $(TSAN) && LD_PRELOAD="$(subst asan,tsan,$(ASAN_LIBRARIES))" TSAN_OPTIONS=$(TSAN_OPTIONS) PYTHONPATH=. \
		OMP_NUM_THREADS=1 setarch -R $(PYTHON) -m torch.distributed.run --standalone --nproc-per-node 2 \
		tests/support/under_tsan.py 60

# A copy of this source in folder $(1), with an extension built with -fsanitize=$(2).
define build_copy
	rm -rf $(1)/zcompile $(1)/passes $(1)/csrc $(1)/tests
	mkdir -p $(1)
	git ls-files -z --cached --others --exclude-standard | xargs -0 cp -P --parents --preserve=timestamps -t $(1)
	cd $(1) && $(ALONE) CFLAGS=-fsanitize=$(2) LDFLAGS=-fsanitize=$(2) $(PYTHON) setup.py --quiet build_ext --inplace
	cd $(1) && $(ALONE) $(PYTHON) setup.py --quiet egg_info
endef

# Tensor and expert parallelism in every combination, and a thousand steps with delayed ranks: about an hour.
.PHONY: compose
compose: install
	ZCOMPILE_COMPOSE_ORDERS=1000 OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q -m "" \
		$(wildcard tests/distributed/test_compose*.py) $(ARGS)

# A hundred runs in which a rank fails at a random place (tests/support/chaos.py): about ten minutes.
.PHONY: chaos
chaos: install
	ZCOMPILE_CHAOS_SEEDS=100 OMP_NUM_THREADS=1 $(PYTHON) -m pytest -q tests/distributed/test_chaos.py $(ARGS)
