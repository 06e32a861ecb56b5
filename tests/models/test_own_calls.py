"""How many of our own functions one save and one restore run through: 1.6 times those of torchsnapshot 0.1.0.

Counted in a fresh process, in a repository that exists, for a state of two tensors: every call of a Python function
whose file is in the product, on every thread, but for comprehensions, which newer Pythons do not call. A count is
the same on every machine.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys, threading
import torch
import datasvc
from datasvc.models import save
from datasvc.models.restoring.restore import restore
from datasvc.repository import Repository

ROOT, ACT, URL = sys.argv[1:]
FOLDERS = tuple(f"{ROOT}/{name}/" for name in ("datasvc", "loaders", "trainer"))
num_calls = 0

def count(frame, event, _):
    global num_calls
    code = frame.f_code
    is_function = not code.co_name.endswith(("comp>", "<genexpr>"))
    num_calls += event == "call" and is_function and code.co_filename.startswith(FOLDERS)

torch.manual_seed(0)
state = {"weight": torch.randn(64, 64), "bias": torch.randn(64)}
repository = Repository.open(URL)
threading.setprofile(count)
sys.setprofile(count)
done = save(repository, "net", state, step=1) if ACT == "save" else restore(repository, "net").state
sys.setprofile(None)
threading.setprofile(None)
print(json.dumps(num_calls))
"""


def own_calls(act, url, folder):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(ROOT), act, url], cwd=folder, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_save_and_a_restore_run_through_few_functions(repository, tmp_path):
    assert 100 < own_calls("save", repository.url, tmp_path) <= 340
    assert 100 < own_calls("restore", repository.url, tmp_path) <= 220
