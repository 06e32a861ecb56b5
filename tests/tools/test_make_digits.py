import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def digests(folder):
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow
def test_the_same_seed_gives_the_same_bytes_and_another_holds_out_others(digits_folder, tmp_path):
    for seed in (0, 1):
        program = [sys.executable, ROOT / "tools" / "make_digits.py", tmp_path / str(seed), "--seed", str(seed)]
        subprocess.run(program, check=True, capture_output=True)
    assert digests(tmp_path / "0") == digests(digits_folder)
    assert digests(tmp_path / "0").keys() != digests(tmp_path / "1").keys()


def test_all_scans_are_there_in_ten_classes_with_a_fifth_held_out(digits_folder):
    counts = {split: len(list((digits_folder / split).rglob("*.jpg"))) for split in ("train", "val")}
    assert counts == {"train": 1437, "val": 360}
    assert sorted(path.name for path in (digits_folder / "train").iterdir()) == list("0123456789")
