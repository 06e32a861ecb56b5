# `make help` lists the targets. Nothing is assumed but Linux, Python 3.11 or newer, make and a package index.
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all test-long lowest lowest-frameworks check bench docs dist clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1	/' | expand -t 20

setup: .venv/ready  ## make .venv with everything in it

.venv/ready: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "datasvc needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; name another with PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@# Tests read our MDS exports with the first, run a program for the second, and use components of the third; what they
	@# depend on (cloud clients, torchvision, an old `datasets`) has no part in that.
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps mosaicml-streaming litdata \
		torchtitan spmd_types tyro docstring-parser typeguard
	@touch $@

demo: setup  ## the main job end to end on real images: ingest, stage, train, kill, resume, compare
	$(BIN)/python tools/demo.py demo-run

# The fast set writes and flushes many thousands of small files. They are in memory if it has room for them, unless TMPDIR
# names another folder; `test-all` uses the disk for most of them.
MEMORY := $(shell df -k --output=avail /dev/shm 2>/dev/null | awk 'NR == 2 && $$1 > 8000000 {print "/dev/shm"}')
IN_MEMORY := TMPDIR=$${TMPDIR:-$(or $(MEMORY),/tmp)}
# Bytecode is kept: without it, each process of a test compiles hundreds of modules, and pytest rewrites all tests.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := -m pytest -n 2 --dist worksteal
PYTEST_IN_MEMORY := $(PYTEST) -o tmp_path_retention_policy=failed

test: setup  ## all tests but the long ones
	$(IN_MEMORY) $(BIN)/python $(PYTEST_IN_MEMORY) -m 'not slow and not long'

test-all: setup  ## all tests but those of test-long, each property on all its examples
	HYPOTHESIS_PROFILE=all $(BIN)/python $(PYTEST) -m 'not long'

# Before an issue is closed, not at each change.
test-long: setup lowest-frameworks  ## benchmarks run whole, soaks, images, other Pythons, torchtitan, floors of frameworks
	$(BIN)/python $(PYTEST) -m long

# Floors: extras, and the tests of what uses their packages. Everything else is that of .venv, such as torch.
LOWEST := s3 hub yaml text sign ui pandas audio video
LOWEST_TESTS := $(addprefix tests/shards/,format query images audio video sources/tabular sources/tar) tests/repository/store \
	$(addprefix tests/models/,interop test_search.py) tests/loaders/audio tests/loaders/video tests/node/http tests/cache/catalogue tests/doctor \
	tests/cli/test_cli.py tests/test_extras.py tests/test_sql_sandbox.py

# Likewise for frameworks and trackers, some of which need newer packages than the core does. Kills are left to test-all.
# gcs: Lightning imports gcsfs, and that of .venv needs a newer protobuf than the trackers at their floors.
LOWEST_FRAMEWORKS := images train onnx plot demo tensorboard wandb mlflow lightning accelerate transformers \
	torchdata jax keras gcs
LOWEST_FRAMEWORKS_TESTS := $(patsubst %,tests/integrations/test_%.py,lightning accelerate transformers torchdata jax keras trackers) \
	tests/models/interop/test_onnx_file.py tests/trainer/recipes/reporting/test_metric_logs.py tests/trainer/function \
	tests/loaders/profiling/test_report.py tests/shards/images

lowest lowest-frameworks: export DATASVC_TEST_SERVERS = replaced
lowest lowest-frameworks: export PYTHONPATH = $(CURDIR)
lowest: setup  ## some tests with the oldest versions that pyproject.toml allows
	$(BIN)/python tools/lowest_environment.py .venv-lowest/core $(LOWEST)
	$(IN_MEMORY) .venv-lowest/core/bin/python $(PYTEST_IN_MEMORY) -m 'not slow and not long' $(LOWEST_TESTS)

lowest-frameworks: setup  ## the same for the frameworks of datasvc.integrations
	$(BIN)/python tools/lowest_environment.py --newer-core .venv-lowest/frameworks $(LOWEST) $(LOWEST_FRAMEWORKS)
	$(IN_MEMORY) .venv-lowest/frameworks/bin/python $(PYTEST_IN_MEMORY) -k 'not killed' $(LOWEST_FRAMEWORKS_TESTS)

check: setup  ## ruff, mypy and the import directions
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/test_imports.py

# Not among them: averaging, sync_curves, buckets, compressed_gradients and hierarchical need root and network namespaces, store_streams a bucket;
# the others take long or much disk. docs/reference/benchmarks.md has their commands.
BENCHES := order ingest ingest_samples ingest_memory open_version cache loader evaluation large_photos small_images shared models_find \
	ui_pages ui_live run_log trainer negotiation start profile_check layout_memory
NOT_BENCHES := groups signals staging loss_forecast mixture views open_view averaging sync_curves buckets compressed_gradients compression_advice hierarchical plan_check models_local models_sharded store_streams \
	loader_resume models models_trained_on pages shared_training slow_worker lost_ranks decode_servers tokens attention audio video remote_video attach columns metadata

bench: setup  ## most benchmarks, one after the other; results belong into docs/reference/benchmarks.md
	for name in $(BENCHES); do $(BIN)/python -m tools.bench $$name || exit 1; done

docs: setup  ## the documentation as a site: build/book/site/index.html
	$(BIN)/python -m tools.book build/book

dist: setup  ## wheels and source archive of a release in dist/, with URL=address of the project
	$(BIN)/python tools/build_release.py dist $(if $(URL),--url $(URL))

clean:  ## remove .venv and what the demo made
	rm -rf .venv .venv-lowest demo-run build dist
