# Every target sets up what it needs: Python 3.11 or newer and make are all that you have to have.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
EXECUTED := _build/executed
LAB ?= accumulate_vs_ddp
LAB_NAME = $(basename $(notdir $(LAB)))
RANKS ?= 4
ARGS ?=
# The core's tests: what a change of src/miniddp breaks first.
CORE_TESTS = tests/test_architecture.py tests/miniddp/test_manual.py tests/miniddp/test_ladder.py \
	tests/miniddp/test_buckets.py tests/miniddp/test_reducer.py tests/miniddp/test_ddp_behavior.py \
	tests/miniddp/test_ddp_equals_torch.py

.PHONY: help book html serve update lab check test test-site test-cluster gpu versions clean

help:
	@echo "Read the book"
	@echo "  make book               run every chapter and build the book; prints where it is"
	@echo "  make serve              serve the built book on this machine's loopback address [OPEN=1]"
	@echo "Run a lab"
	@echo "  make lab LAB=NAME       run labs/NAME.py under torchrun [RANKS=4] [ARGS=…]"
	@echo "Change the code"
	@echo "  make check              lint, format, types, and the core's tests: a minute and a half"
	@echo "  make test               every test, every chapter, every lab: about a quarter of an hour"
	@echo "  make test-site          open every built page in Chromium, after make html"
	@echo "  make test-cluster       two hosts and a Slurm on this machine (Linux, as root)"
	@echo "  make gpu                prove on the GPUs here what a CPU cannot [ARGS=…]"
	@echo "  make versions TORCH=V   the tests of miniddp on torch V, in a scratch environment"
	@echo "Change a chapter"
	@echo "  make update             run the chapters in place and store their outputs [CHAPTER=…]"
	@echo "  make html               render what the last make book or make test executed"
	@echo "Start over"
	@echo "  make clean              remove what was built, and the virtual environment"

# --editable puts all of src/ on the path, so labkit and grader can be imported, too.
$(READY): requirements.txt constraints.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("This project needs Python 3.11 or newer; %s is %s. Choose another with: make … PYTHON=python3.12" % (sys.executable, sys.version.split()[0]))'
	@echo "Setting up $(VENV) (once; a few minutes) …"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt -c constraints.txt --editable '.[book,doctor,grader,test]'
	@touch $@

# `make test` compares text outputs; here the chapters only have to run.
book: $(READY)
	@echo "Running the chapters, two at a time …"
	@$(BIN)/python -m labkit.book.chapters execute book $(EXECUTED)
	@$(MAKE) --no-print-directory html

# Renders what the last `make book` or `make test` executed, and checks every link and picture of
# every page. Warnings are errors. BOOK_REPOSITORY=https://github.com/… adds launch buttons.
html: $(READY)
	@test -d $(EXECUTED) || { echo "Nothing has been executed yet: make book does that first." >&2; exit 2; }
	@$(BIN)/python -m labkit.book.site configure _config.yml _build/_config.yml
	@echo "Rendering the pages …"
	@$(BIN)/jupyter-book build $(EXECUTED) --config _build/_config.yml --path-output . -W -n --keep-going -q >_build/render.log 2>&1 || { cat _build/render.log; exit 1; }
	@$(BIN)/python -m labkit.book.site finish _build/html
	@$(BIN)/python -m labkit.book.site check _build/html
	@echo "The book: file://$(abspath _build/html/index.html)"

check: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest --quiet --numprocesses=2 $(CORE_TESTS)

test: $(READY)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy
	@$(BIN)/python -m pytest --numprocesses=2 --durations=25 --durations-min=5

# Opens what `make html` rendered. Debian's Chromium: apt-get install chromium.
test-site: $(READY)
	@$(BIN)/python -m pytest $(wildcard tests/site tests/figures/in_browser)

test-cluster: $(READY)
	@tests/cluster/needs.sh
	@$(BIN)/python -m pytest tests/cluster

# Exit code 2 where there is no GPU. `make gpu ARGS="--device cpu"` rehearses without one.
gpu: $(READY)
	@$(BIN)/python -m tests.gpu $(ARGS)

# Prints one row of the table in CONTRIBUTING.md. Downloads torch, with its CUDA packages 5.6 GB.
versions:
	@$(PYTHON) tests/torch_versions.py $(TORCH)

update: $(READY)
	@$(BIN)/python -m labkit.book.chapters update $(CHAPTER)

lab: $(READY)
	@test -f labs/$(LAB_NAME).py || { echo "There is no labs/$(LAB_NAME).py. There are:" >&2; grep -l 'labkit.launch.lab' labs/*.py | sed 's|labs/|  |; s|\.py$$||' >&2; exit 2; }
	@OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) labs/$(LAB_NAME).py $(ARGS)

# OPEN=1 opens it in the default browser; PORT=… changes the port.
serve: $(READY)
	@$(BIN)/python -m labkit.book.serve _build/html $(if $(PORT),--port $(PORT)) $(if $(OPEN),--open)

clean:
	rm -rf _build $(VENV)
