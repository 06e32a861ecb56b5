"""What an ingest frees is the system's again."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FREED = """
import re
import numpy as np
import pyarrow as pa
from datasvc.shards.ingestion.executors import keep_lean
keep_lean()

def resident_mib():
    with open("/proc/self/status") as status:
        return int(re.search(r"VmRSS:\\s+(\\d+)", status.read())[1]) >> 10

def filled(size):
    buffer = pa.allocate_buffer(size)
    np.frombuffer(buffer, np.uint8)[:] = 1
    return buffer

for _ in range(3):
    filled(4 << 20)  # freed: this is what teaches glibc to keep such memory
before = resident_mib()
batches = [filled(1 << 20) for _ in range(64)]
full = resident_mib()
batches = batches[-1:]
print(full - before, resident_mib() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="an option of glibc's allocator")
def test_a_process_that_keeps_lean_gives_batches_back_though_one_of_them_stays():
    said = subprocess.run([sys.executable, "-c", FREED], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    held, left = map(int, said.split())
    assert held >= 50
    assert left < 10
