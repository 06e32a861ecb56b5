"""Every benchmark runs on a tiny workload and prints its figures; nothing here judges a speed."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench.__main__ import MODULES
from tools.bench.photos import write_photos

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(900)


def run(program, *arguments):
    """Run a benchmark; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.bench", program, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=870,  # only bounds a hang: the trainer's takes two minutes of processor time
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_json(program, *arguments):
    return json.loads(run(program, "--json", *arguments))


def check(found, repeats):
    assert found.keys() == {"machine", "commit", "rows", "ratios"}
    assert found["machine"].keys() == {"cpu", "cores", "memory_gib", "python"}
    assert found["rows"]
    assert found["ratios"]
    for figure in found["rows"] + found["ratios"]:
        assert figure["n"] == repeats
        low, median, high = (figure[name] for name in ("min", "median", "max"))
        assert low <= median <= high
        assert all(map(math.isfinite, (low, high)))
        # Noise can make what the ranks add to a step look like less than nothing.
        assert low > 0 or figure["name"].endswith("overhead"), figure


def test_make_bench_runs_every_benchmark_or_names_it_as_left_out():
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", "")
    run_by_make, left_out = (
        re.search(rf"^{name} := (.*)$", makefile, re.MULTILINE)[1].split() for name in ("BENCHES", "NOT_BENCHES")
    )
    assert sorted([*run_by_make, *left_out]) == sorted(MODULES)


@pytest.mark.long
def test_large_photos_and_small_images_are_measured():
    check(run_json("large_photos", "--repeats", 1, "--images", 1, "--size", 64), repeats=1)
    check(run_json("small_images", "--repeats", 1, "--images", 400, "--batch", 32), repeats=1)


def test_the_access_order_is_measured():
    check(run_json("order", "--repeats", 2, "--samples", 20_000, "--shards", 31), repeats=2)


def test_the_padding_and_the_order_of_groups_are_measured():
    check(run_json("groups", "--repeats", 2, "--samples", 600, "--shards", 3, "--large", 2000), repeats=2)


@pytest.mark.long
def test_ingest_is_measured(tmp_path):
    check(run_json("ingest", "--repeats", 2, "--images", 24, "--folder", tmp_path), repeats=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_small_samples_memory_and_huge_versions_are_measured(tmp_path):
    samples = run_json("ingest_samples", "--repeats", 1, "--samples", 2000, "--folder", tmp_path)
    names = {row["name"] for row in samples["rows"]}
    assert names >= {"1 process", "2 workers", "peak resident set of one of 2 workers"}
    memory = run_json("ingest_memory", "--repeats", 1, "--images", 24, "--folder", tmp_path)
    assert [row["name"] for row in memory["rows"]] == ["photos", "tars"]
    opened = run_json("open_version", "--repeats", 1, "--shards", 1000)
    assert {row["name"] for row in opened["rows"]} == {"import", "open", "locate", "peak_gb"}
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_compressed_columns_are_measured(tmp_path):
    check(run_json("columns", "--repeats", 1, "--samples", 2000, "--rows", 20, "--folder", tmp_path), repeats=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_both_evaluations_are_measured():
    check(run_json("evaluation", "--repeats", 2, "--images", 130), repeats=2)


@pytest.mark.long
def test_clips_of_sounds_are_measured(tmp_path):
    check(run_json("audio", "--repeats", 1, "--files", 16, "--batch", 4, "--folder", tmp_path), repeats=1)


@pytest.mark.long
def test_clips_of_videos_are_measured(tmp_path):
    check(run_json("video", "--repeats", 1, "--files", 4, "--batch", 2, "--folder", tmp_path), repeats=1)
    check(run_json("remote_video", "--repeats", 1, "--frames", 120, "--folder", tmp_path), repeats=1)


@pytest.mark.long
def test_the_loader_is_measured(tmp_path):
    arguments = ["--repeats", 1, "--images", 61, "--batch", 8, "--size", 32, "--folder", tmp_path]
    check(run_json("loader", *arguments), repeats=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_the_trainer_is_measured():
    tiny = ("--repeats", 1, "--seconds", 0.1, "--workload", "ResNet-18, 32x32")
    check(run_json("trainer", *tiny), repeats=1)


@pytest.mark.long
def test_negotiation_is_measured_and_its_bits_are_fewer_than_its_messages():
    printed = run_json("negotiation", "--repeats", 1, "--ranks", "3")
    check(printed, repeats=1)
    (ratio,) = (ratio for ratio in printed["ratios"] if ratio["name"] == "bits / messages alone, bytes")
    assert ratio["median"] < 1


@pytest.mark.long
def test_the_start_of_programs_is_measured(tmp_path):
    check(run_json("start", "--repeats", 1, "--images", 8, "--batch", 4, "--folder", tmp_path), repeats=1)


def test_figures_are_shown_as_tables_too():
    shown = run("order", "--repeats", 1, "--samples", 2000, "--shards", 3)
    assert "positions/s" in shown
    assert "ratio" in shown


@pytest.mark.long
def test_photos_differ_and_equal_seeds_give_equal_bytes(tmp_path):
    write_photos(tmp_path / "many", num_images=62)
    write_photos(tmp_path / "few", num_images=3)
    many = {path.name: path.read_bytes() for path in (tmp_path / "many").glob("*/*.jpg")}
    few = {path.name: path.read_bytes() for path in (tmp_path / "few").glob("*/*.jpg")}
    assert len(few) == 3
    assert few.items() <= many.items()
    assert len(set(many.values())) == 62
    assert 60_000 < sum(map(len, many.values())) / 62 < 160_000


@pytest.mark.long
def test_finding_model_versions_is_measured(tmp_path):
    sizes = ("--versions", 200, "--behind", 3, "--folder", tmp_path)
    check(run_json("models_find", "--repeats", 2, *sizes), repeats=2)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_acts_on_growing_repositories_are_measured(tmp_path):
    sizes = ("--shards", 2, 4, "--versions", 3, 6, "--models", 200, 300, "--folder", tmp_path)
    reports = run("metadata", "--json", "--repeats", 1, *sizes).splitlines()
    assert len(reports) == 3
    for found in map(json.loads, reports):
        check(found, repeats=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_pages_over_many_versions_are_measured(tmp_path):
    found = run_json("ui_pages", "--repeats", 1, "--versions", 300, "--folder", tmp_path)
    assert all(row["median"] > 0 for row in found["rows"])
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_pages_of_data_are_measured():
    found = run_json("pages", "--repeats", 1, "--shards", 3, "--samples", 300, "--model-mb", 1)
    names = {row["name"] for row in found["rows"]}
    assert {"100 thumbnails, first", "change of a model's layers, first", "memory"} <= names
    assert all(row["median"] > 0 for row in found["rows"])


@pytest.mark.long
def test_the_time_of_a_new_point_and_the_bytes_of_a_refresh_are_measured():
    found = run_json("ui_live", "--points", 2, "--steps", 20)
    assert [(row["name"], row["n"]) for row in found["rows"]] == [
        (f"{store}: {what}", 2)
        for store in ("local", "s3")
        for what in ("report until the page has the point", "a refresh", "a refresh, compressed")
    ]
    assert all(row["min"] > 0 for row in found["rows"])


@pytest.mark.long
def test_the_cost_of_signals_is_measured_part_by_part():
    sizes = ("--steps", 1, "--calls", 3, "--save-every", 3, "--batch", 4, "--model", "small-cnn")
    found = run_json("signals", "--repeats", 2, *sizes)
    assert [row["name"] for row in found["rows"]] == ["step", "loss of each sample", "record", "file of a save / 3"]
    assert found["ratios"][-1]["name"] == "all that is added / step"
    assert found["ratios"][-1]["min"] > 0


@pytest.mark.long
def test_the_cost_of_a_run_log_is_measured_in_both_ways():
    sizes = ("--steps", 5, "--width", 8, "--batch", 2, "--step-ms", 0.1)
    found = run_json("run_log", "--repeats", 2, *sizes)
    assert {figure["name"] for figure in found["rows"] + found["ratios"]} == {
        f"{kind}: {what}"
        for kind in ("sleep", "compute")
        for what in (
            "step without a log",
            "processor time of the log",
            "processor time of the log / step",
            "step with a log / without",
        )
    }
    assert all(figure["n"] == 2 for figure in found["rows"])


@pytest.mark.long
def test_hierarchical_allreduces_are_measured_beside_flat_ones_and_predicted():
    found = run_on_nodes("hierarchical", "--mbit", 1000, "--sizes", 1)
    assert [ratio["name"].rpartition(": ")[2] for ratio in found["ratios"]] == [
        "flat / hierarchical",
        "predicted / measured, flat",
        "predicted / measured, hierarchical",
    ]


def run_on_nodes(program, *arguments, repeats=2):
    """Run a benchmark that makes network namespaces, or skip where the machine refuses them."""
    try:
        tried = subprocess.run(["unshare", "--net", "true"], capture_output=True, check=False).returncode
    except OSError:
        tried = 1
    if tried or not all(map(shutil.which, ("ip", "tc", "nsenter"))):
        pytest.skip("this machine refuses network namespaces, or has no iproute2")
    found = run_json(program, "--repeats", repeats, *arguments)
    check(found, repeats=repeats)
    return found


@pytest.mark.long
def test_chosen_buckets_are_measured_beside_a_grid_of_sizes():
    found = run_on_nodes("buckets", "--steps", 1, "--backward-ms", 20, "--grid", 1, 25)
    assert [row["name"] for row in found["rows"]] == ["auto", "1 MiB", "25 MiB"]
    assert len(found["ratios"]) == 3


@pytest.mark.long
@pytest.mark.skipif(not Path("/dev/net/tun").exists(), reason="this machine has no TUN devices")
def test_averaging_every_few_steps_sends_the_inverse_of_these_steps_in_bytes():
    found = run_on_nodes("averaging", "--steps", 16, "--compute-ms", 5, "--delay-ms", 1)
    ratios = {ratio["name"]: ratio["median"] for ratio in found["ratios"]}
    assert ratios["bytes: bsp / local:4"] == pytest.approx(4, rel=0.02)
    assert ratios["bytes: bsp / local:16"] == pytest.approx(16, rel=0.02)
    assert ratios["bytes: bsp / diloco:16:fragments=4,delay=2"] == pytest.approx(16, rel=0.02)
    # A byte for 4, and 4 bytes for 512 of them. So few bytes that those of idle cycles of the engine count.
    codec = ratios["bytes: bsp / diloco:16:fragments=4,delay=2,codec=int8"]
    assert codec == pytest.approx(16 * 4 / (1 + 4 / 512), rel=0.05)


@pytest.mark.long
def test_the_memory_of_layouts_is_measured_beside_that_of_data_parallelism():
    sizes = ("--layers", 2, "--width", 32, "--tokens", 8)
    found = run_json("layout_memory", "--repeats", 2, *sizes, "shard=4:3", "data=2,shard=2:3")
    check(found, repeats=2)
    assert len(found["rows"]) == len(found["ratios"]) == 3 * 4
    ratios = {ratio["name"]: ratio["median"] for ratio in found["ratios"]}
    # Bytes of tensors, which do not vary.
    assert ratios["shard=4:3 states / data=4"] == pytest.approx(0.25, rel=0.05)
    assert ratios["data=2,shard=2:3 states / data=4"] == pytest.approx(0.5, rel=0.05)
    assert ratios["shard=4:3 states, estimated / measured"] == pytest.approx(1, rel=0.05)


@pytest.mark.long
def test_compressed_gradients_are_measured_by_accuracy_and_bytes():
    found = run_on_nodes("compressed_gradients", "--epochs", 1)
    (ratio,) = found["ratios"]
    assert ratio["name"] == "none / powersgd:2, bytes"
    assert ratio["min"] > 1


@pytest.mark.long
def test_the_advice_on_compressions_is_measured_beside_steps_with_each():
    found = run_on_nodes("compression_advice", "--steps", 2, repeats=1)
    compressions = ["fp16", "quantized:int8", "quantized:onebit"]
    assert [row["name"] for row in found["rows"]] == ["none", *compressions]
    names = [f"{name}: predicted / measured gain" for name in compressions]
    assert [ratio["name"] for ratio in found["ratios"]][1::2] == names
