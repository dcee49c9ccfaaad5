# make reproduce   run every experiment and write report.html   (SCALE=smoke|cpu|gpu, ARGS="--only=...")
# make test        the quick tests, a few minutes on two cores  (JOBS=2 for two workers, ARGS="-k maze")
# make test-slow   all tests that need no accelerator
# make bench       timings on this machine
# make gpu-check   numerics and timings of the kernels on a GPU, into gpu_check.json
# make clean       remove .venv and what was built; runs/ and results/ stay
#
# Each target makes .venv first when it is missing or older than setup.cfg and the constraints.
# PYTHON=/path/to/python3.12 chooses the interpreter for .venv (3.11 or 3.12);
# PY=python3 runs with an interpreter that has all packages already, without .venv.

SCALE ?= smoke
JOBS ?= 1
VENV := .venv
# Written last: it holds "<version> <folder>", so an interrupted, moved or broken .venv is made anew.
READY := $(VENV)/installed

version_of = $(shell $(1) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
has_venv = $(shell $(1) -c 'import ensurepip, venv' 2>/dev/null && echo yes)

HAVE := $(call version_of,$(VENV)/bin/python)
ifneq ($(shell cat $(READY) 2>/dev/null),$(HAVE) $(CURDIR))
  HAVE :=
else ifneq ($(PYTHON),)
  HAVE := $(filter $(call version_of,$(PYTHON)),$(HAVE))
endif

ifeq ($(HAVE),)
  CANDIDATES := $(or $(PYTHON),python3 python3.11 python3.12)
  SUITABLE := $(strip $(foreach p,$(CANDIDATES),$(if $(filter 3.11 3.12,$(call version_of,$(p))),$(p))))
  CHOSEN := $(firstword $(foreach p,$(SUITABLE),$(if $(call has_venv,$(p)),$(p))))
  FOUND = $(foreach p,$(CANDIDATES),$(p)=$(or $(call version_of,$(p)),none))
  REMEDY := for example: make test PYTHON=/path/to/python3.12
  PROBLEM = $(strip $(if $(SUITABLE),$(firstword $(SUITABLE)) has no venv or no ensurepip module; \
install it (Debian and Ubuntu: python3-venv) or name another Python 3.11 or 3.12,\
sakanajax needs Python 3.11 or 3.12 (found $(FOUND)); install one and name it), $(REMEDY))
endif
VERSION = $(or $(HAVE),$(call version_of,$(CHOSEN)))

ifdef PY
  RUN := $(PY)
  NEEDS :=
else
  RUN := $(VENV)/bin/python
  NEEDS := $(READY)
endif

# Compilers for GPUs and TPUs that are not here (pallas_kernels/_compat.py says why they lie apart).
AOT_3.11 := jax-cuda12-plugin==0.10.2 libtpu==0.0.42
AOT_3.12 := jax-cuda12-plugin==0.11.2 libtpu==0.0.48

# Compiled programs are kept between runs, apart for each kind of processor.
CPU := $(shell { grep -m1 -E '^(flags|Features)' /proc/cpuinfo || uname -mp; } 2>/dev/null | cksum | cut -d' ' -f1)
CACHE = $${SAKANAJAX_CACHE:-$${HOME:-/tmp}/.cache/sakanajax}
KEEP = JAX_COMPILATION_CACHE_DIR="$${JAX_COMPILATION_CACHE_DIR:-$(CACHE)/xla-$(CPU)}" \
	JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.2
TEST = JAX_PLATFORMS=cpu $(KEEP) $(if $(filter-out 1,$(JOBS)),NPROC=1 OMP_NUM_THREADS=1) \
	$(RUN) -m pytest $(if $(filter-out 1,$(JOBS)),-n $(JOBS))

.PHONY: help reproduce test test-slow bench gpu-check clean FORCE

help:
	@sed -n '/^#/!q;s/^# \{0,1\}//p' Makefile

reproduce: $(NEEDS)
	@$(KEEP) $(RUN) -m experiments.reproduce --scale=$(SCALE) $(ARGS)

test: $(NEEDS)
	@$(TEST) -m "not slow and not gpu" $(ARGS)

test-slow: $(NEEDS)
	@$(TEST) -m "not gpu" $(ARGS)

bench: $(NEEDS)
	@$(RUN) -m experiments.bench $(ARGS)

gpu-check: $(NEEDS)
	@$(RUN) -m pallas_kernels.gpu_check $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): setup.cfg pyproject.toml constraints-3.11.txt constraints-3.12.txt $(if $(HAVE),,FORCE)
	$(if $(HAVE)$(CHOSEN),,$(error $(PROBLEM)))
	@rm -f $@
	@$(if $(HAVE),:,rm -rf $(VENV) && $(CHOSEN) -m venv $(VENV)) || \
	  { echo "sakanajax: cannot make $(VENV) with $(CHOSEN); free some space or name another: $(REMEDY)" >&2; exit 1; }
	@echo "sakanajax: installing into $(VENV) (about 3 GB; two to four minutes)"
	@$(VENV)/bin/python -m pip install --disable-pip-version-check --no-input \
	  --constraint constraints-$(VERSION).txt --editable '.[test]' || \
	  { echo "sakanajax: the installation failed (see pip's last lines; it needs the network); run the same command to try again" >&2; exit 1; }
	@rm -rf $(VENV)/aot && $(VENV)/bin/python -m pip install --disable-pip-version-check --no-input --quiet --no-deps \
	  --target $(VENV)/aot $(AOT_$(VERSION)) || \
	  { echo "sakanajax: without $(AOT_$(VERSION)) kernels cannot be compiled for absent devices; their tests will be skipped" >&2; }
	@$(VENV)/bin/python -m pallas_kernels.twell.cpu || true
	@echo "$(VERSION) $(CURDIR)" > $@
