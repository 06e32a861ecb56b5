"""The benchmarks of models run on tiny workloads and print their figures; nothing here judges a speed."""

import pytest

from tests.tools.test_bench import check, run_json

TINY = ["--repeats", 1, "--checkpoints", 2, "--steps", 1, "--model", "small-cnn"]


def names_of(found):
    return {figure["name"] for figure in found["rows"] + found["ratios"]}


@pytest.mark.long
def test_saves_and_restores_are_measured():
    found = run_json("models", "speed", "--optimizer", "adamw", *TINY)
    check(found, repeats=1)
    wanted = ("save, torch.save", "save, datasvc, codec delta", "restore, DCP", "blocked, datasvc / torch.save")
    assert names_of(found) >= {f"adamw: {name}" for name in wanted}


@pytest.mark.long
def test_what_checkpoints_take_on_disk_is_measured():
    found = run_json("models", "sizes", "--optimizer", "sgd", *TINY)
    check(found, repeats=1)
    wanted = ("2 weights, codec planes", "2 whole states, codec delta")
    assert names_of(found) >= {f"sgd: {name}: stored / raw" for name in wanted} | {
        "sgd: frozen backbone: added / all"
    }


@pytest.mark.long
def test_what_saves_cost_the_steps_is_measured_for_all_optimizers_in_one_answer():
    tiny = ["--overhead-model", "small-cnn", "--max-stall", "50%"]
    found = run_json("models", "overhead", "--repeats", 1, *tiny)
    check(found, repeats=1)
    assert [figure["name"] for figure in found["ratios"]] == [
        f"{optimizer}: step at 50% / step without saves" for optimizer in ("sgd", "adamw")
    ]


@pytest.mark.long
def test_who_saw_a_sample_is_measured():
    found = run_json("models_trained_on", "--repeats", 1, "--keys", 20, "--runs", 2, "--versions", 2, "--shards", 20)
    assert {row["name"] for row in found["rows"]} == {"import", "answer", "peak_gb"}
