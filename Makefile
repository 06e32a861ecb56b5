# `make help` lists the targets. Nothing is assumed but Linux, Python 3.11 or newer, make and a package index.
PYTHON ?= python3
BIN := .venv/bin

LOWEST := s3 hub yaml text sign ui pandas

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lowest check bench docs dist clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1	/' | expand -t 20

setup: .venv/ready  ## make .venv with everything in it

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "datasvc needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; name another with PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@# Tests read our MDS exports with the first, and run a program for the second; what they depend on (cloud clients,
	@# torchvision) has no part in that.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps mosaicml-streaming litdata
	@touch $@

demo: setup  ## the main job end to end on real images: ingest, stage, train, kill, resume, compare
	$(BIN)/python tools/demo.py demo-run

# The fast set writes and flushes many thousands of small files. They are in memory if it has room for them, unless TMPDIR
# names another folder; `test-all` uses the disk.
MEMORY := $(shell df -k --output=avail /dev/shm 2>/dev/null | awk 'NR == 2 && $$1 > 8000000 {print "/dev/shm"}')

test: setup  ## all tests but the long ones
	TMPDIR=$${TMPDIR:-$(or $(MEMORY),/tmp)} $(BIN)/python -m pytest -m 'not slow' -n 2 --dist worksteal -o tmp_path_retention_policy=failed

test-all: setup  ## all tests, each property on all its examples
	HYPOTHESIS_PROFILE=all $(BIN)/python -m pytest -n 2 --dist worksteal

# The packages of the core and of some extras; torch, DALI and the tools of the tests are those of .venv.
lowest: setup  ## the fast tests with the oldest versions that pyproject.toml allows; takes long
	$(PYTHON) -m venv .venv-lowest
	.venv-lowest/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/python -c 'from datasvc.extras import CORE, packages_of as of; print(*CORE, *sum(map(of, "$(LOWEST)".split()), ()), sep="\n")' >.venv-lowest/list.txt
	.venv-lowest/bin/uv pip install --quiet --python .venv-lowest/bin/python --resolution lowest-direct --only-binary :all: -r .venv-lowest/list.txt
	$(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >$$(.venv-lowest/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/zz_rest.pth
	PYTHONPATH=. .venv-lowest/bin/python -m pytest -m 'not slow'

check: setup  ## ruff, mypy and the import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_imports.py

bench: setup  ## most benchmarks, some minutes; results belong into docs/reference/benchmarks.md
	$(BIN)/python tools/bench/order.py
	$(BIN)/python tools/bench/ingest.py
	$(BIN)/python tools/bench/ingest_samples.py
	$(BIN)/python tools/bench/ingest_memory.py
	$(BIN)/python tools/bench/open_version.py
	$(BIN)/python tools/bench/cache.py
	$(BIN)/python tools/bench/loader.py
	$(BIN)/python tools/bench/trainer.py
	$(BIN)/python tools/bench/profile_check.py
	$(BIN)/python tools/bench/layout_memory.py
	$(BIN)/python tools/bench/ui_pages.py
	$(BIN)/python tools/bench/pages.py
	$(BIN)/python tools/bench/ui_live.py
	PYTHONPATH=. $(BIN)/python tools/bench/run_log.py

docs: setup  ## the documentation as a site: build/book/site/index.html
	$(BIN)/python -m tools.book build/book

dist: setup  ## wheel and source archive of a release in dist/, with URL=address of the project
	$(BIN)/python tools/build_release.py dist $(if $(URL),--url $(URL))

clean:  ## remove .venv and what the demo made
	rm -rf .venv .venv-lowest demo-run build dist
