"""Which tests a run takes, and in which order.

Files with slow tests come first, those of the longest limits before all: the last tests of a run are then short, and
its workers end together. The tests of a file stay together, because they share fixtures.

`.ci/run` would run most tests of `make test` a second time in `make test-all`. What has passed in the first run is
left out of the second one if it cannot differ there: `DATASVC_TEST_RECORD=FILE` makes a run write what passed, and
`DATASVC_TEST_PASSED=FILE` makes a run read it. `make test` has its files in memory if it can; with
`DATASVC_TEST_DISK=FOLDER` those of the rooms that depend on the file system are in FOLDER, and need no second run.
`make test-all` by itself leaves out nothing.
"""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.said import say

RECORD, PASSED, DISK = "DATASVC_TEST_RECORD", "DATASVC_TEST_PASSED", "DATASVC_TEST_DISK"

# These depend on the file system, by the files in their `tmp_path`.
ON_DISK = (
    "tests/cache/", "tests/ledger/", "tests/models/tensors/", "tests/repository/", "tests/shards/format/",
    "tests/shards/ingestion/", "tests/api/", "tests/test_durable.py",
)  # fmt: skip
# A cluster depends on its network, and the others on folders that several tests share.
AGAIN = ("tests/cluster/", "tests/faults/", "tests/formats/")
REAL_SERVERS = {"s3_bucket"}  # fixtures that `make test` takes from a replacement

_record: Path | None = None
_passed, _not_passed = set(), set()


def pytest_configure(config):
    # Taken out of the environment: a test may itself start pytest.
    if not hasattr(config, "workerinput") and RECORD in os.environ:
        globals()["_record"] = Path(os.environ.pop(RECORD))


def pytest_itemcollected(item):
    # So `make test` has the same tests, and takes as long, on a machine with a browser and on a bare one.
    if "browser" in item.fixturenames:
        item.add_marker("slow")


def pytest_collection_modifyitems(config, items):
    _put_slow_files_first(items)
    if PASSED in os.environ:
        known = set(json.loads(Path(os.environ.pop(PASSED)).read_text()))
        left_out = {item for item in items if item.nodeid in known and cannot_differ(item)}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
        say(f"left out {len(left_out)} tests that passed in the run before and cannot differ in this one")


def pytest_runtest_logreport(report):
    if not report.passed:
        _not_passed.add(report.nodeid)
    elif report.when == "call":
        _passed.add(report.nodeid)


def pytest_sessionfinish():
    if _record:
        known = {name for name in _passed - _not_passed if DISK in os.environ or not name.startswith(ON_DISK)}
        _record.write_text(json.dumps(sorted(known)))


@contextmanager
def folder_of(item, folder: Path) -> Iterator[Path]:
    """Yield the folder for the files of a test: `folder`, or one on the disk."""
    if DISK not in os.environ or not item.nodeid.startswith(ON_DISK):
        yield folder
        return
    with tempfile.TemporaryDirectory(dir=os.environ[DISK], ignore_cleanup_errors=True) as on_disk:
        yield Path(on_disk)


def cannot_differ(item):
    """Return whether a test that passed in `make test` does the same in `make test-all`."""
    return not (
        item.nodeid.startswith(AGAIN)
        or REAL_SERVERS & set(item.fixturenames)
        or getattr(item.obj, "is_hypothesis_test", False)  # has more examples
    )


def _put_slow_files_first(items):
    limits_s = {}
    for item in items:
        if item.get_closest_marker("slow"):
            limit = item.get_closest_marker("timeout")
            limits_s[item.path] = max(limits_s.get(item.path, 1), limit.args[0] if limit else 1)
    items.sort(key=lambda item: -limits_s.get(item.path, 0))
