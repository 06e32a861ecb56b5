"""A run that was saved at one layout continues at any other: with the weights, moments and losses of one process.

A new run at any layout starts with the weights of such a version.
"""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import datasvc
from datasvc.ledger.audit import audit_folders
from datasvc.runs import list_runs, read_run
from tests.support import warm_python

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TIMEOUT_S = 800.0
BLOCK, VOCABULARY = 8, 29
LAYOUTS = {
    "data": {"layout": "data=4"},
    "zero": {"layout": "data=2,shard=2", "zero": 1},
    "shard": {"layout": "shard=4"},
    "hybrid": {"layout": "data=2,shard=2"},
    "tensor": {"layout": "shard=2,tensor=2"},
    "pipeline": {"layout": "pipeline=2,shard=2", "micro_batch": 2},
    "context": {"layout": "tensor=2,context=2"},
    "alone": {},
}
FOUR = [name for name in LAYOUTS if name != "alone"]
# One epoch of 12 steps, with an optimizer whose state has tensors and numbers.
LAMB = {"optimizer": "lamb", "epochs": 1, "max_steps": None}
KILLED = {"layout": "pipeline=2,shard=2", "micro_batch": 2, "checkpoint_every": 1, "kill_at": 5, **LAMB}


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resumes")
    generator = torch.Generator().manual_seed(0)
    for split, number in (("train", 96), ("val", 16)):
        starts = torch.randint(VOCABULARY, (number, 1), generator=generator)
        tokens = ((starts + 3 * torch.arange(BLOCK)) % VOCABULARY).int().tolist()
        (folder / "source" / split).mkdir(parents=True)
        table = pa.table({"tokens": pa.array(tokens, pa.list_(pa.int32(), BLOCK))})
        pq.write_table(table, folder / "source" / split / "blocks.parquet")
    url = str(folder / "repo")
    datasvc.open(url, create=True).datasets.ingest(str(folder / "source"), "tokens")
    return url


def assert_close(found, expected, path="", tolerance=1e-5):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), (path, found.keys() ^ expected.keys())
        for key, value in expected.items():
            assert_close(found[key], value, f"{path}.{key}", tolerance)
    elif isinstance(expected, torch.Tensor):
        assert torch.allclose(found, expected, atol=tolerance, rtol=0), (path, (found - expected).abs().max())
    else:
        assert (
            found == pytest.approx(expected, abs=tolerance) if isinstance(expected, float) else found == expected
        ), path


def bytes_read(output, rank):
    """Return the bytes that a rank has read in each of its restores."""
    events = [json.loads(line[line.index("{") :]) for line in output.splitlines() if '"restored"' in line]
    return [event["size_bytes"] for event in events if event["rank"] == rank]


def losses(models, name):
    (log,) = list_runs(models.repository, name)
    series = read_run(models.repository, name, log.id).series["loss"]
    return dict(zip(series.steps.tolist(), series.values.tolist(), strict=True))


def test_a_run_saved_at_one_layout_continues_at_any_other(launcher, url, tmp_path):
    ledger = {"ledger": str(tmp_path / "ledger")}
    killed = {
        "killed": {**KILLED, **ledger},
        "killed-alone": LAMB,
        "killed-tensor": {"layout": "shard=2,tensor=2", **LAMB, **ledger},
    }

    def request(save, resume, init):
        return json.dumps({"layouts": {**LAYOUTS, **killed}, "save": save, "resume": resume, "init": init})

    def run(num_ranks, *runs):
        return launcher.run_program(num_ranks, "layout_resumes.py", url, request(*runs), timeout_s=TIMEOUT_S).stdout

    program = launcher.program("layout_resumes.py")
    # By the fifth step, two later saves have been queued, so the first one is complete; others may not be.
    lost = launcher.run(4, warm_python.command(), program, url, request(["killed"], [], []), timeout_s=TIMEOUT_S)
    assert lost.returncode != 0
    assert "rank 2 was the first to fail" in lost.stderr
    output = run(1, ["alone", "killed-alone"], [("alone", "alone")], [("alone", "alone")])
    bytes_alone = bytes_read(output, 0)[-1]
    # Each layout continues what its neighbour in the list has saved, and one process, and one process continues each.
    ring = list(zip(FOUR, [*FOUR[1:], FOUR[0]], strict=True))
    initialised = ["shard", "tensor", "zero", "pipeline"]
    output = run(
        4,
        FOUR,
        [*ring, ("alone", "tensor"), ("alone", "pipeline"), ("alone", "zero"), ("killed", "killed-tensor")],
        [("alone", name) for name in initialised],
    )
    run(1, [], [*((name, "alone") for name in FOUR), ("killed", "killed-alone")], [])

    models = datasvc.open(url).models
    undisturbed = losses(models, "killed-alone")
    assert len(undisturbed) == 12
    for name in ("killed-then-killed-tensor", "killed-then-killed-alone"):
        expected = {step: undisturbed[step] for step in range(2, 13)}
        assert losses(models, name) == pytest.approx(expected, abs=1e-5), name
    # Ranks of the same data rank serve the same samples, which the audit counts once.
    audit = audit_folders([tmp_path / "ledger"])
    assert audit.is_proven
    assert (audit.num_files, [epoch.served for epoch in audit.epochs]) == (8, [96])

    alone, expected = models.restore("alone@1"), models.restore("alone-then-alone")
    resumed = [name for name in models.names() if "-then-" in name and "killed" not in name]
    assert len(resumed) == 1 + len(FOUR) + 3 + len(FOUR)
    for name in resumed:
        found = models.restore(name)
        assert found.entry["step"] == 6
        assert found.entry["parent"] == f"{name.partition('-then-')[0]}@1"
        assert found.entry["metrics"]["val_loss"] == pytest.approx(expected.entry["metrics"]["val_loss"], abs=1e-5), (
            name
        )
        for part in ("model", "ema"):
            assert_close(found.state[part], expected.state[part], f"{name} {part}")
        assert_close(found.state["optimizer"]["state"], expected.state["optimizer"]["state"], f"{name} optimizer")
        if "tensor=2" in LAYOUTS[name.rpartition("-then-")[2]].get("layout", ""):
            # Neighbours compute the same activations, so dropout must draw the same numbers on both.
            drawn = [rank["random"]["torch"] for rank in found.state["rank_state"]]
            assert torch.equal(drawn[0], drawn[1]), name
            assert torch.equal(drawn[2], drawn[3]), name
            assert not torch.equal(drawn[0], drawn[2]), name

    expected = models.restore("alone-into-alone")
    # The tokens were trained, the excluded tensors were not: their random weights are those of the seed.
    assert torch.equal(expected.state["model"]["tokens.weight"], alone.state["model"]["tokens.weight"])
    assert not torch.equal(
        expected.state["model"]["blocks.1.mlp.0.weight"], alone.state["model"]["blocks.1.mlp.0.weight"]
    )
    for name in initialised:
        found = models.restore(f"alone-into-{name}")
        assert found.entry["parent"] == "alone@1"
        assert found.entry["metrics"]["val_loss"] == pytest.approx(expected.entry["metrics"]["val_loss"], abs=1e-6)
        for part in ("model", "ema"):
            assert_close(found.state[part], expected.state[part], f"{found.version} {part}", 1e-6)
    # A rank of a pipeline reads the tensors of its stage only.
    assert all(bytes_read(output, rank)[-1] < 0.9 * bytes_alone for rank in range(4))

    logs = {name: list_runs(models.repository, name)[0] for name in LAYOUTS}
    headers = {name: read_run(models.repository, name, log.id).header for name, log in logs.items()}
    whole = headers["alone"]["facts"]["num_parameters"]
    assert {name: header["facts"]["num_parameters"] for name, header in headers.items()} == dict.fromkeys(
        LAYOUTS, whole
    )

    execution = models.describe("pipeline").entry["execution"]
    assert execution["layout"] == {"replica": 1, "data": 1, "shard": 2, "tensor": 1, "pipeline": 2, "context": 1}
    assert execution["parallelism"] == "hybrid"
    found = models.find("execution.layout.tensor = 2 and execution.consistency = 'synchronous'")
    assert {version.name for version in found} >= {"tensor", "context", "hybrid-then-tensor"}
    assert "all-to-all" in models.describe("tensor").entry["execution"]["communication"]
    found = models.find("execution.topology = 'decentralised' and execution.layout.pipeline = 2")
    assert {version.name for version in found} >= {"pipeline"}
    assert not {"tensor", "shard"} & {version.name for version in found}
    assert not models.find("execution.topology = 'centralised'")


def test_a_divided_run_refuses_a_version_of_another_architecture_with_one_table(launcher, url):
    options = {"layers": "layers=3", "heads": "heads=2", "width": "width=64", "context": f"context={2 * BLOCK}"}
    base = ("layers=2", "heads=4", "width=32", "dropout=0.0", f"context={BLOCK}")
    layouts = {name: {"layout": "shard=2", "model_option": [*base, option]} for name, option in options.items()}
    layouts["shaped"] = {"layout": "shard=2"}
    request = {"layouts": layouts, "save": ["shaped"], "resume": [], "init": []}
    request["refuse"] = [("shaped", name) for name in options]
    done = launcher.run_program(2, "layout_resumes.py", url, json.dumps(request), timeout_s=TIMEOUT_S)
    found = [json.loads(line[line.index("{") :]) for line in done.stdout.splitlines() if '"error"' in line]
    errors = {rank: [each["error"] for each in found if each["rank"] == rank] for rank in (0, 1)}
    assert [len(texts) for texts in errors.values()] == [4, 4]
    for name, text in zip(options, errors[0][:3], strict=False):
        assert "shaped@1 has a model with layers=2, heads=4, width=32, and the model 'gpt' of this run has" in text
        assert options[name] in text
    # The context is no size that a layout divides: the tensors differ, and one rank lists them.
    assert "positions.weight" in errors[0][3]
    assert "positions.weight" not in errors[1][3]
    assert "rank 0 prints the differences" in errors[1][3]


@pytest.mark.parametrize(
    ("part", "settings"),
    [
        ("step", {"layout": "shard=2", "zero": 1}),
        ("start", {"layout": "pipeline=2"}),
        ("close", {"layout": "shard=2"}),
    ],
)
def test_a_rank_that_stops_in_any_part_of_a_run_is_reported(launcher, url, part, settings):
    request = {"layouts": {"stopped": {**settings, "micro_batch": 2, "lost_after": 3.0, "stop_in": part}}}
    request |= {"save": ["stopped"], "resume": [], "init": []}
    program = launcher.program("layout_resumes.py")
    lost = launcher.run(2, warm_python.command(), program, url, json.dumps(request), timeout_s=TIMEOUT_S)
    assert lost.returncode != 0
    assert "rank 0: rank 1 was lost, of 2, without a sign of life for 3 s: read the output there" in lost.stderr
    assert "error: HorovodInternalError: rank 1 was lost" in lost.stderr
