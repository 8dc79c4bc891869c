# make lab    set everything up and open JupyterLab on lesson 00      (LAB_ARGS=--no-browser for a headless machine)
# make test   set everything up and run the checks that guard a user: about eleven minutes on two cores
# make test-all  the same, mypy, and everything long: processes, sweeps, compilers, browsers, peers, the site
# make site   build the course as web pages that load nothing from anywhere, into build/site   (SITE_ARGS='--address=https://… --repository=https://…': where they, and the code, will be)
# make slides the slides for the labs, into build/slides.html
# make gpu    on a machine with NVIDIA GPUs: their tests, benchmarks and labs in an hour; run it again to continue; installs nothing
# All but make gpu use .venv with the versions in requirements.lock. PYTHON=/path/to/python3.12 chooses the interpreter.
# All paths are relative, so the checkout may lie in a directory with spaces in its name.

SHELL := /bin/sh
RUN := .venv/bin/python
PYTHON ?=
LAB_ARGS ?=
SITE_ARGS ?=
PYTEST_ARGS ?= -n 3
LOCK_ARGS ?=
export PYTHON
# glibc gives every thread a heap of its own and keeps it: virtual ranks are threads, and a test run starts thousands.
export MALLOC_ARENA_MAX = 2

.PHONY: help lab test test-all site slides gpu check check-all all-of-reference all-of-course style types build docs house format lock clean setup-lab setup-test setup-site

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile
	@echo 'make build  rebuild notebooks/, exercises/ and solutions/ from their sources'
	@echo 'make docs   rewrite the generated pages in docs/'
	@echo 'make house  print the sizes of the tree, and names whose docstrings lack something'
	@echo 'make format write the code as ruff would'
	@echo 'make lock   choose versions and write requirements.lock'
	@echo 'make clean  remove .venv and caches; your notebooks stay'

setup-lab:
	@sh tools/setup.sh lab

setup-test:
	@sh tools/setup.sh test,site

setup-site:
	@sh tools/setup.sh site

lab: setup-lab
	@$(RUN) tools/lab.py $(LAB_ARGS)

test: setup-test
	@sh tools/system_packages.sh
	@$(MAKE) --no-print-directory check

test-all: setup-test
	@sh tools/system_packages.sh
	@$(MAKE) --no-print-directory check-all

site: setup-site
	@$(RUN) -m tools.website $(SITE_ARGS)

slides: setup-site
	@$(RUN) -m tools.slides tools/slides.md build/slides.html

gpu:
	@sh tools/gpu_check.sh

# Without setting up. Two runs, as the course and the reference need other packages: a process that loads all of them is large.
check: style
	$(RUN) -m pytest $(PYTEST_ARGS) -m "not thorough" --nbval notebooks tests/course
	$(RUN) -m pytest $(PYTEST_ARGS) -m "not thorough" --ignore=tests/course tests

# CI draws as `make test` does, so that one commit has one verdict.
check-all: export SEED = $(if $(CI),,--seed fresh)
check-all: style types
	@$(MAKE) --no-print-directory --keep-going all-of-reference all-of-course

all-of-reference:
	$(RUN) -m pytest $(PYTEST_ARGS) $(SEED) --ignore=tests/course tests

all-of-course:
	$(RUN) -m pytest $(PYTEST_ARGS) $(SEED) --nbval tests/course notebooks solutions

style:
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	.venv/bin/lint-imports --no-cache
	.venv/bin/ringlab build --check

types:
	$(RUN) -m mypy

build: setup-test
	.venv/bin/ringlab build

docs: setup-test
	$(RUN) -m tools.docs

house: setup-test
	@$(RUN) -m tools.house

format: setup-test
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# A version stays as it is where it still fits; LOCK_ARGS=--upgrade takes the newest. Left out: markers, as pip installs nothing for a
# constraint; CUDA's packages, and local versions such as torch's +cpu, as each machine's pip configuration decides on a build of torch.
# [test] and [site] include every extra but those that need CUDA.
lock: setup-test
	mkdir -p build && cp requirements.lock build/lock
	printf '%s\n' 'hatchling>=1.27' editables | .venv/bin/uv pip compile --quiet --universal --python-version 3.11 --extra test --extra site \
	    --no-annotate --custom-compile-command 'make lock' $(LOCK_ARGS) --output-file build/lock pyproject.toml -
	sed -E '/^(nvidia|cuda)-/d; s/ ;.*//; s/\+[a-z0-9.]+$$//' build/lock >requirements.lock

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
