import json
import multiprocessing
import pickletools
from collections import OrderedDict

import pytest
import torch

from datasvc.errors import ConfigError, CorruptDataError, NotFoundError
from datasvc.models import (
    CheckpointManager,
    CodeRevision,
    DataUse,
    describe_code,
    describe_model,
    list_models,
    model_log,
    restore,
    save,
)
from datasvc.models.saving import save as saving
from datasvc.models.tensors.chunk_writer import OWN_OBJECT_BYTES
from datasvc.models.tensors.tensor_table import read_table
from datasvc.models.versions.commit import base_records
from datasvc.repository import Repository
from tests.progress import RecordedProgress

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool, torch.complex64, torch.uint16, torch.uint32, torch.float8_e4m3fn,
]  # fmt: skip


def trained():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Linear(200, 3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 200)).sum().backward()
    optimizer.step()
    return model, optimizer


def bits(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


def files(repository):
    from pathlib import Path

    return sorted(path for path in Path(repository.url, "objects").rglob("*") if path.is_file())


def test_model_and_optimizer_come_back_bit_for_bit(repository):
    model, optimizer = trained()
    save(repository, "m", {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, step=1)
    state = restore(repository, "m@1").state
    assert all(torch.equal(state["model"][name], value) for name, value in model.state_dict().items())
    fresh, fresh_optimizer = trained()
    fresh.load_state_dict(state["model"])
    fresh_optimizer.load_state_dict(state["optimizer"])
    for before, after in zip(optimizer.state.values(), fresh_optimizer.state.values(), strict=True):
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_comes_back(repository, dtype):
    raw = torch.randint(0, 2, (4, 6), dtype=torch.uint8)
    wide = raw.to(torch.float32).to(dtype)
    state = {"matrix": wide, "scalar": wide[0, 0], "empty": wide[:0], "strided": wide.t(), "slice": wide[:, ::2]}
    save(repository, "m", {"t": state}, step=0)
    back = restore(repository, "m").state["t"]
    for name, tensor in state.items():
        assert back[name].dtype == dtype
        assert back[name].shape == tensor.shape
        assert bits(back[name]) == bits(tensor)


class TiedNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(20, 8)
        self.head = torch.nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight


def test_tied_tensors_come_back_tied_and_are_read_once(repository):
    net = TiedNet()
    progress = RecordedProgress()
    save(repository, "m", {"model": net.state_dict()}, step=0)
    found = restore(repository, "m", progress=progress)
    weights = found.state["model"]
    assert type(weights) is OrderedDict
    assert weights["head.weight"] is weights["embedding.weight"]
    assert torch.equal(weights["head.weight"], net.head.weight)
    assert found.report.size_bytes == progress.total == 20 * 8 * 4
    assert list(restore(repository, "m", only=["model.head"]).state) == ["model.head.weight"]
    with CheckpointManager(repository, "background") as manager:
        manager.save({"model": net.state_dict(), "ema": {"w": net.head.weight.clone()}}, step=0)
        manager.wait()
        state = manager.restore().state
    assert state["model"]["head.weight"] is state["model"]["embedding.weight"]
    assert state["ema"]["w"] is not state["model"]["head.weight"]


def test_tensors_that_a_state_calls_tied_stay_apart_if_their_values_differ(repository):
    weight = torch.ones(3)
    version = save(repository, "m", {"a": weight, "b": weight.detach(), "c": torch.zeros(3)}, step=0)
    entry = repository.entry(version).content
    state = json.loads(repository.objects.read(entry["state"]))
    state["types"] = [[["b"], "tied", "c"], [["a"], "tied", "gone"], [["c"], "tied", "b"]]
    other = repository.objects.put(json.dumps(state).encode()).digest
    repository.versions("models", "m").append(lambda _: {**entry, "state": other})
    restored = restore(repository, "m").state
    assert [restored[name].tolist() for name in "abc"] == [[1.0] * 3, [1.0] * 3, [0.0] * 3]


def test_nan_and_signed_zero_keep_their_bits(repository):
    tensor = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    save(repository, "m", {"t": tensor}, step=0)
    assert restore(repository, "m").state["t"].numpy().tobytes() == tensor.numpy().tobytes()


def test_unchanged_tensors_are_stored_once_over_all_versions(repository):
    frozen = torch.randn(OWN_OBJECT_BYTES)
    save(repository, "m", {"frozen": frozen, "head": torch.randn(10)}, step=0)
    before = sum(path.stat().st_size for path in files(repository))
    save(repository, "m", {"frozen": frozen, "head": torch.randn(10)}, step=1)
    assert sum(path.stat().st_size for path in files(repository)) - before < OWN_OBJECT_BYTES


def test_a_flipped_byte_in_any_object_is_detected_and_a_tensor_is_named(repository):
    model, optimizer = trained()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    save(repository, "m", state, step=1, code=CodeRevision(None, dirty=False))
    for path in files(repository):
        raw = path.read_bytes()
        for place in {0, len(raw) // 2, len(raw) - 1}:
            path.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
            with pytest.raises(CorruptDataError, match="is corrupt"):
                restore(repository, "m")
        path.write_bytes(raw)
    restore(repository, "m")


def test_a_missing_tensor_is_named(repository):
    save(repository, "m", {"big": torch.randn(OWN_OBJECT_BYTES)}, step=1)
    (record,) = read_table(repository.objects, describe_model(repository, "m").tensors)
    repository.objects.local_path(record.chunks[0].chain[0].object).unlink()
    with pytest.raises(NotFoundError, match="tensor 'big' is missing"):
        restore(repository, "m")


def test_no_stored_byte_is_a_pickle(repository):
    model, optimizer = trained()
    save(repository, "m", {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "x": (1, b"y")}, step=1)
    for path in files(repository):
        with pytest.raises((ValueError, IndexError)):
            pickletools.dis(path.read_bytes(), out=open("/dev/null", "w"))  # noqa: SIM115


def test_a_version_says_what_it_came_from(repository):
    use = DataUse("digits@1", "train", {"epoch": 2, "position": 17})
    code = CodeRevision("abc123", dirty=True)
    save(
        repository, "m", {}, step=7, data=[use], config={"lr": 0.1}, metrics={"acc": 0.9, "bad": float("nan")},
        parent="m@3", message="hello", code=code,
    )  # fmt: skip
    entry = describe_model(repository, "m").entry
    assert entry["data"] == [{"dataset": "digits@1", "split": "train", "state": {"epoch": 2, "position": 17}}]
    assert (entry["step"], entry["config"], entry["parent"], entry["message"]) == (7, {"lr": 0.1}, "m@3", "hello")
    assert entry["metrics"] == {"acc": 0.9, "bad": "nan"}
    assert CodeRevision(**entry["code"]) == code
    assert str(code) == "abc123 (with local changes)"


def test_code_outside_a_checkout_is_said_to_be(tmp_path):
    assert describe_code(tmp_path) == CodeRevision(None, dirty=False)


def test_the_code_revision_is_gits(tmp_path):
    import subprocess

    def git(*arguments):
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid"]
        return subprocess.run(
            ["git", "-C", tmp_path, *identity, *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    (tmp_path / "train.py").write_text("1")
    git("init"), git("add", "."), git("commit", "-m", "x")
    assert describe_code(tmp_path) == CodeRevision(git("rev-parse", "HEAD"), dirty=False)
    (tmp_path / "train.py").write_text("2")
    assert describe_code(tmp_path).dirty


def save_some(url, writer):
    repository = Repository.open(url)
    for step in range(5):
        save(repository, "m", {"w": torch.full((3,), float(writer))}, step=step, message=f"writer {writer}")


@pytest.mark.usefixtures("warm_workers")
@pytest.mark.slow
def test_two_jobs_saving_to_one_name_both_land(repository):
    context = multiprocessing.get_context("spawn")
    jobs = [context.Process(target=save_some, args=(repository.url, writer)) for writer in range(2)]
    [job.start() for job in jobs]
    [job.join() for job in jobs]
    versions = model_log(repository, "m")
    assert [version.version for version in versions] == list(range(1, 11))
    for version in versions:
        state = restore(repository, f"m@{version.version}").state
        assert version.entry["message"] == f"writer {int(state['w'][0])}"


def test_what_cannot_be_stored_leaves_no_version(repository):
    with pytest.raises(ConfigError, match=r"optimizer\.fn"):
        save(repository, "m", {"optimizer": {"fn": len}}, step=0)
    with pytest.raises(ConfigError, match="tensor 's'"):
        save(repository, "m", {"s": torch.eye(3).to_sparse()}, step=0)
    assert repository.names("models") == []


def test_models_are_listed_with_tags(repository):
    save(repository, "b", {}, step=1), save(repository, "a", {}, step=1), save(repository, "a", {}, step=2)
    repository.tag("models", "a@2", "prod")
    assert [(each.name, each.version, each.tags) for each in list_models(repository)] == [
        ("a", 2, ("prod",)),
        ("b", 1, ()),
    ]
    assert [each.tags for each in model_log(repository, "a")] == [(), ("prod",)]


def test_conjugate_and_negative_views_are_stored_as_their_values(repository):
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    state = {"conjugate": tensor.conj(), "negative": tensor.conj().imag}
    save(repository, "m", state, step=0)
    back = restore(repository, "m").state
    assert back["conjugate"].tolist() == [1 - 2j, 3 + 4j]
    assert back["negative"].tolist() == [-2.0, 4.0]


@pytest.mark.parametrize(
    ("constant", "message"),
    [("state_tree.STATE_FORMAT", "state format 1"), ("tensor_table.TENSOR_TABLE_FORMAT", "tensor format 2")],
)
def test_a_checkpoint_of_a_later_format_is_refused(repository, monkeypatch, constant, message):
    save(repository, "m", {"w": torch.ones(2)}, step=0)
    monkeypatch.setattr(f"datasvc.models.tensors.{constant}", 0)
    with pytest.raises(ConfigError, match=f"{message}; this datasvc reads up to 0"):
        restore(repository, "m")


def test_files_git_does_not_track_do_not_make_the_code_dirty(tmp_path):
    import subprocess

    for arguments in (["init"], ["-c", "user.name=t", "-c", "user.email=t@x", "commit", "--allow-empty", "-m", "x"]):
        subprocess.run(["git", "-C", tmp_path, *arguments], check=True, capture_output=True)
    (tmp_path / "notes").write_text("x")
    assert not describe_code(tmp_path).dirty


def test_the_order_of_a_states_keys_does_not_change_its_tensor_table(repository):
    first, second = torch.zeros(2), torch.ones(2)
    save(repository, "m", {"a": first, "b": second}, step=0)
    save(repository, "m", {"b": second, "a": first}, step=0)
    assert describe_model(repository, "m@1").tensors == describe_model(repository, "m@2").tensors


def drifting(repository, versions, *, name="m", codec="delta"):
    """Save weights that change a little from version to version; returns them."""
    torch.manual_seed(0)
    states = [torch.randn(30_000) * 0.02]
    for step in range(versions):
        save(repository, name, {"w": states[-1]}, step=step, codec=codec)
        states.append(states[-1] + torch.randn(30_000) * 1e-10)
    return states[:-1]


def chain_of(repository, ref):
    (record,) = read_table(repository.objects, describe_model(repository, ref).tensors)
    return record.chunks[0].chain


def test_every_version_of_a_long_history_is_restored_from_its_own_table_alone(repository):
    states = drifting(repository, 20)
    lengths = [len(chain_of(repository, f"m@{number}")) for number in range(1, 21)]
    assert lengths == [1, 2, 3] * 6 + [1, 2]
    for number, state in enumerate(states, 1):
        assert torch.equal(restore(repository, f"m@{number}").state["w"], state)
    sizes = [describe_model(repository, f"m@{number}").entry["stored_bytes"] for number in range(1, 21)]
    assert sum(sizes) < 0.4 * 20 * states[0].nbytes


def test_differences_are_to_the_parent_that_is_named_else_to_the_newest_version(repository):
    (first,) = drifting(repository, 1)
    save(repository, "m", {"w": torch.zeros(30_000)}, step=1)
    close = first + 1e-9
    save(repository, "other", {"w": close}, step=0, parent="m@1")
    assert chain_of(repository, "other")[0] == chain_of(repository, "m@1")[0]
    assert torch.equal(restore(repository, "other").state["w"], close)
    assert base_records(repository, "m", None) == read_table(
        repository.objects, describe_model(repository, "m@2").tensors
    )
    assert base_records(repository, "new", "nobody@7") == ()


def test_parents_are_what_they_meant_when_the_save_began_and_are_there(repository, monkeypatch):
    save(repository, "m", {}, step=1), save(repository, "m", {}, step=2)
    repository.tag("models", "m@1", "best")
    store = saving.store_tensors

    def moved_meanwhile(*args, **options):
        repository.tag("models", "m@2", "best")
        return store(*args, **options)

    monkeypatch.setattr(saving, "store_tensors", moved_meanwhile)
    save(repository, "mean", {}, step=1, parent="m@best", merged=["m@best", "m", "nobody@7", "hf://bert"])
    entry = describe_model(repository, "mean").entry
    assert (entry["parent"], entry["merged"]) == ("m@1", ["m@1", "m@2", "nobody@7", "hf://bert"])
    for wrong in ({"parent": "m@9"}, {"parent": "m@bets"}, {"merged": ["m@1", "m@9"]}):
        with pytest.raises(NotFoundError, match=r"no version 9|no tag 'bets'"):
            save(repository, "mean", {}, step=2, **wrong)
        assert repository.living("models", "mean") == [1]
    with CheckpointManager(repository, "mean") as model, pytest.raises(NotFoundError, match="no version 9"):
        model.save({}, step=3, parent="m@9")


def test_a_model_whose_newest_table_is_damaged_can_be_saved_to(repository):
    states = drifting(repository, 2)
    repository.objects.local_path(describe_model(repository, "m").tensors).write_bytes(b"damage")
    save(repository, "m", {"w": states[1]}, step=2)
    assert torch.equal(restore(repository, "m").state["w"], states[1])


def test_an_entry_says_what_was_added_what_is_not_finite_and_what_it_holds(repository):
    state = {"w": torch.tensor([float("nan"), 1.0]), "v": torch.ones(30_000)}
    save(repository, "m", state, step=0, codec="none")
    save(repository, "m", dict(reversed(state.items())), step=1)
    first, second = (describe_model(repository, f"m@{number}").entry for number in (1, 2))
    assert (first["stored_bytes"], second["stored_bytes"]) == (120_008, 0)
    assert first["num_nonfinite"] == {"w": 1}
    assert first["content"] == second["content"]
    save(repository, "m", {**state, "v": torch.zeros(30_000)}, step=2)
    assert describe_model(repository, "m").entry["content"] != first["content"]


def test_saving_reports_its_progress(repository):
    progress = RecordedProgress()
    save(repository, "m", {"w": torch.ones(1000)}, step=0, progress=progress)
    restore(repository, "m", progress=progress)
    assert progress.total == 8000
