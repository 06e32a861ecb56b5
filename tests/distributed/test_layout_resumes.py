"""A run that was saved at one layout continues at any other: with the weights, moments and losses of one process.

A new run at any layout starts with the weights of such a version.
"""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import datasvc

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


def test_a_run_saved_at_one_layout_continues_at_any_other(launcher, url):
    def run(num_ranks, save, resume, init):
        request = json.dumps({"layouts": LAYOUTS, "save": save, "resume": resume, "init": init})
        return launcher.run_program(num_ranks, "layout_resumes.py", url, request, timeout_s=TIMEOUT_S).stdout

    output = run(1, ["alone"], [("alone", "alone")], [("alone", "alone")])
    bytes_alone = bytes_read(output, 0)[-1]
    # Each layout continues what its neighbour in the list has saved, and one process, and one process continues each.
    ring = list(zip(FOUR, [*FOUR[1:], FOUR[0]], strict=True))
    initialised = ["shard", "tensor", "zero", "pipeline"]
    output = run(
        4,
        FOUR,
        [*ring, ("alone", "tensor"), ("alone", "pipeline"), ("alone", "zero")],
        [("alone", name) for name in initialised],
    )
    run(1, [], [(name, "alone") for name in FOUR], [])

    models = datasvc.open(url).models
    alone, expected = models.restore("alone@1"), models.restore("alone-then-alone")
    resumed = [name for name in models.names() if "-then-" in name]
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

    execution = models.describe("pipeline").entry["execution"]
    assert execution["layout"] == {"data": 1, "shard": 2, "tensor": 1, "pipeline": 2, "context": 1}
    assert execution["parallelism"] == "hybrid"
    found = models.find("execution.layout.tensor = 2 and execution.consistency = 'synchronous'")
    assert {version.name for version in found} >= {"tensor", "context", "hybrid-then-tensor"}
