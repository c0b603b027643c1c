# Targets set up the Python packages that they need: you need Python 3.11 or newer, and make. Those
# for the browser and the cluster say what else they need.

# A hundred processes import the packages, and uv compiles none of them: keep what the first compiles.
unexport PYTHONDONTWRITEBYTECODE

PYTHON ?= python3
# make … PIP_OPTIONS="…" gives options of pip to uv, or to pip: an index with CPU builds, a mirror.
PIP_OPTIONS ?=
ENVIRONMENT := .venv
BIN := $(ENVIRONMENT)/bin
READY := $(ENVIRONMENT)/.ready
# make … VENV=/path takes torch from an environment that has one, and leaves that as it is. READY
# holds that path, so that it need not be named again.
REUSED := $(shell cat $(READY) 2>/dev/null)
VENV := $(REUSED)
ifneq ($(wildcard $(READY)),)
ifneq ($(VENV),$(REUSED))
$(error $(ENVIRONMENT) is there already, with $(or $(REUSED),a torch of its own): run make clean first, to reuse $(VENV))
endif
endif
EXECUTED := _build/executed
LAB ?= accumulate_vs_ddp
LAB_NAME = $(patsubst labs/%,%,$(basename $(LAB)))
RANKS ?= 4
ARGS ?=
# Workers of make test and make check; conftest.py chooses how many, if none are given.
WORKERS ?= auto
PORT ?= 8123
$(foreach name,$(filter-out $(if $(filter auto,$(WORKERS)),WORKERS),WORKERS PORT),$(if $(shell test '$($(name))' -ge 0 2>&1 || echo no),$(error $(name) is a whole number, and $(name)=$($(name)) is not)))
# The quickest tests of the core: what a change of src/miniddp breaks first.
CORE_TESTS = tests/test_architecture.py tests/miniddp/test_manual.py tests/miniddp/test_ladder.py \
	tests/miniddp/test_buckets.py tests/miniddp/test_reducer.py \
	tests/miniddp/test_ddp_equals_torch.py

.PHONY: help setup book html serve notebook figures figures-stills update lab check check-types check-core check-tests test test-all test-site test-pages test-figures test-cluster gpu versions lock clean

help:
	@echo "I want to read the book"
	@echo "  make book               run every chapter, build the book, and say where it is"
	@echo "  make serve              serve the built book on this machine's loopback address [PORT=8123] [OPEN=1]"
	@echo "I want to try something"
	@echo "  make setup              set up .venv and nothing else"
	@echo "  make notebook           open a chapter in JupyterLab [CHAPTER=museum]"
	@echo "  make figures            all figures to play with, on one page; prints where it is"
	@echo "  make lab LAB=NAME       run labs/NAME.py under torchrun, such as programs/resume [RANKS=4] [ARGS=…]"
	@echo "I changed code"
	@echo "  make check              lint, format, types, and the core's tests: a minute and a half"
	@echo "  make test               what a change of src, a chapter, or a lab can break [WORKERS=…]"
	@echo "  make test-all           also what is marked slow: all assignments, hostile submissions, other seeds"
	@echo "I changed a chapter"
	@echo "  make update             run chapters in place and store their outputs [CHAPTER=…]"
	@echo "  make html               render what the last make book or make test executed"
	@echo "  make test-site          open every built page in Chromium, after make html"
	@echo "  make figures-stills     draw the still pictures of the figures to play with (Chromium)"
	@echo "I want to know whether it works elsewhere"
	@echo "  make gpu                prove on the GPUs here what a CPU cannot [ARGS=…]"
	@echo "  make test-cluster       two hosts and a Slurm on this machine (Linux, as root)"
	@echo "  make versions TORCH=V   the tests of miniddp on torch V, in a scratch environment"
	@echo "  make lock               write locked.txt: what constraints.txt pins, with hashes"
	@echo "I want to start over"
	@echo "  make clean              remove what was built, and .venv"
	@echo "All but versions and clean set up .venv. PIP_OPTIONS=… takes options of pip; VENV=/path reuses the torch of another"
	@echo "environment; PYTHON=python3.12 chooses the interpreter."

# --editable puts all of src/ on the path, so labkit and grader can be imported, too.
$(READY): requirements.txt constraints.txt locked.txt pyproject.toml
	@echo "Setting up $(ENVIRONMENT) (once) …"
	@$(PYTHON) tools/set_up.py $(ENVIRONMENT) $(if $(VENV),--reuse '$(VENV)') --pip-options='$(PIP_OPTIONS)'
	@echo '$(VENV)' > $@

setup: $(READY)

# `make test` compares text outputs; here the chapters only have to run.
book: $(READY)
	@echo "Running the chapters …"
	@$(BIN)/python -m labkit.book.chapters execute
	@$(MAKE) --no-print-directory html

# Renders what the last `make book` or `make test` executed, and checks every link and picture of
# every page. Warnings are errors. Every page is rendered each time: Sphinx drops the search words of
# pages that it skips.
html: $(READY)
	@test -d $(EXECUTED) || { echo "Nothing has been executed yet: make book does that first." >&2; exit 2; }
	@echo "Rendering the pages …"
	@rm -rf _build/html
	@$(BIN)/jupyter-book build $(EXECUTED) --config _config.yml --path-output . -W -n --keep-going -q --all >_build/render.log 2>&1 || { cat _build/render.log; exit 1; }
	@$(BIN)/python -m labkit.book.site _build/html
	@echo "The book: file://$(abspath _build/html/index.html)"

# The types are checked while the tests run: without mypy's cache they take half a minute.
check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(MAKE) --no-print-directory --jobs=2 --output-sync check-types check-core

check-types:
	@$(BIN)/mypy

check-core:
	@$(BIN)/python -m pytest --quiet --numprocesses=$(WORKERS) --dist=load $(CORE_TESTS)

# The types are checked beside the tests; make check shows an error in them first.
test: CIRCLE = -m "not slow"
test test-all: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(MAKE) --no-print-directory --jobs=2 check-types check-tests CIRCLE='$(CIRCLE)'

check-tests:
	@$(BIN)/python -m pytest --numprocesses=$(WORKERS) --durations=25 --durations-min=5 $(CIRCLE)

# Debian's Chromium: apt-get install chromium.
test-site: test-pages test-figures

# Opens what `make html` rendered. In `make --jobs=2 html test-pages test-figures test-cluster`,
# test-pages waits for html, and test-cluster for test-figures, so that both jobs end at about the
# same time.
test-pages: $(READY) $(filter html,$(MAKECMDGOALS))
	@$(BIN)/python -m pytest --numprocesses=2 --dist=load tests/site

test-figures: $(READY)
	@$(BIN)/python -m pytest tests/figures/in_browser

test-cluster: $(READY) $(filter test-figures,$(MAKECMDGOALS))
	@tests/cluster/needs.sh
	@$(BIN)/python -m pytest tests/cluster

figures: $(READY)
	@$(BIN)/python -m tests.figures.figure_pages

figures-stills: $(READY)
	@$(BIN)/python -m tests.figures.figure_pages stills

# Exit code 2 where there is no GPU. `make gpu ARGS="--device cpu"` rehearses without one.
gpu: $(READY)
	@$(BIN)/python -m tests.gpu $(ARGS)

# Prints one row of the table in tools/README.md. Downloads torch, with its CUDA packages 5.6 GB.
versions:
	@$(PYTHON) tools/torch_versions.py $(TORCH)

# No configuration: the hashes are those of the public index. Torch has another build for each device.
lock: $(READY)
	@grep -v '^torch==' constraints.txt | $(BIN)/uv pip compile --no-config --quiet --universal --no-deps --no-annotate --custom-compile-command 'make lock' --generate-hashes --output-file locked.txt -

# Opens a copy, in notebooks/: a reader's changes do not touch what the tests compare.
notebook: $(READY)
	@$(BIN)/python -m labkit.book.notebook $(CHAPTER) $(ARGS)

update: $(READY)
	@$(BIN)/python -m labkit.book.chapters update $(CHAPTER)

lab: UNDER_TORCHRUN = -e labkit.launch.lab -e init_process_group
lab: $(READY)
	@test -f 'labs/$(LAB_NAME).py' || { echo "There is no labs/$(LAB_NAME).py. There are:" >&2; grep -l $(UNDER_TORCHRUN) labs/*.py labs/programs/*.py | sed 's|labs/|  |; s|\.py$$||' >&2; exit 2; }
	@grep -q $(UNDER_TORCHRUN) labs/$(LAB_NAME).py || { echo "labs/$(LAB_NAME).py starts its own ranks: $(BIN)/python labs/$(LAB_NAME).py $(ARGS)" >&2; exit 2; }
	@$(BIN)/python -m labkit.launch.nodes --lab --nodes 1 --nproc-per-node '$(RANKS)' labs/$(LAB_NAME).py $(ARGS)

# OPEN=1 opens it in the default browser. The log of requests is not shown.
serve: $(READY)
	@test -f _build/html/index.html || { echo "There is no book in _build/html: make book builds it." >&2; exit 2; }
	@$(if $(OPEN),(sleep 1; $(BIN)/python -m webbrowser http://127.0.0.1:$(PORT)/ >/dev/null) &)
	@$(BIN)/python -u -m http.server $(PORT) --bind 127.0.0.1 --directory _build/html 2>_build/serve.log || { tail -n 1 _build/serve.log; echo "Choose another port: make serve PORT=8124"; exit 1; } >&2

clean:
	rm -rf _build $(ENVIRONMENT)
