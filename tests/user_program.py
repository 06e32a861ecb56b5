"""A program of a user: it calls every public method of `datasvc.open(...)` and of a checkpoint manager once.

It also trains in the loop of README.md.

`tests/test_user_program.py` runs it on a small data set, checks its types, and compares its calls with the facade.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import assert_type

import numpy as np
import torch

import datasvc
import datasvc.trainer as hvd
from datasvc.cache import Cache
from datasvc.errors import ConfigError, NotFoundError
from datasvc.loaders import ImageLoader
from datasvc.models import RetentionPolicy, SaveHandle, load_private_key, make_key
from datasvc.shards import SourceOptions


def use_datasets(folder: Path, images: Path) -> None:
    """Call the methods of `repo.datasets`."""
    repo = datasvc.open(str(folder / "repo"), create=True)
    assert repo.datasets.dry_run(str(images), "pets", limit=5).num_samples == {"train": 5, "val": 5}
    made = repo.datasets.ingest(
        str(images),
        "pets",
        source_options=SourceOptions(format="image-folder"),
        shard_bytes=4000,
        on_bad="skip",
        duplicates="keep",
        val_fraction=None,
        workers=1,
        message="first",
    )
    assert str(made.version) == "pets@1"
    assert repo.datasets.names() == ["pets"]
    repo.datasets.tag("pets@1", "stable", expect=0)

    keys = [sample.key for sample in repo.datasets.head("pets@stable", 2, split="train")]
    assert repo.datasets.delete("pets", keys=keys, message="two fewer").num_deleted == 2
    assert len(repo.datasets.diff("pets@1", "pets@2").splits["train"].deleted) == 2
    assert repo.datasets.combine(["pets@2", "pets@1"], "all", on_common="drop", on_split_overlap="keep").num_samples
    assert repo.datasets.name_classes("pets", ["a", "b", "c", "d"], message="names").version == 3
    assert repo.datasets.revert("all@1", message="again").is_new is False
    assert str(repo.datasets.rename("all", "everything", message="a better name")) == "everything@1"
    repo.datasets.tag("everything@1", "old")
    assert repo.datasets.remove(["everything@old"], force=True, message="not needed").untagged == ("everything@old",)

    assert [dataset.resolved.name for dataset in repo.datasets.ls()] == ["pets"]
    assert [entry.content["message"] for entry in repo.datasets.log("pets", last=2)] == ["two fewer", "names"]
    assert repo.datasets.describe("pets@1")["message"] == "first"
    assert repo.datasets.bad_samples("pets@1") == []
    assert [version.version for version in repo.datasets.versions("pets")] == [1, 2, 3]
    assert repo.datasets.resolve("pets@stable").version == 1
    assert repo.datasets.tags("pets") == {"stable": 1}
    repo.datasets.untag("pets", "stable", expect=1)
    assert len(repo.datasets.tag_history("pets", "stable")) == 2
    with suppress(ConfigError):  # it is intact
        repo.datasets.mark_lost(["pets@1"], force=False, message="disk failure")

    assert repo.datasets.sql("pets", "select count(*) as n from train").to_pylist() == [{"n": 18}]
    page = repo.datasets.samples("pets", "train", where="label = 1", order="key desc", count=1)
    assert repo.datasets.sample("pets", page.samples[0].key, split="train").duplicates.searched_shards > 0
    assert repo.datasets.histogram("pets", "label", bins=4).num_samples == 18
    assert [versions.version for versions in repo.datasets.shared_bytes("pets", last=2)] == [2, 3]
    assert repo.datasets.contact_sheet("pets", folder / "pets.html", 1, split="val") == 1
    assert repo.datasets.export("pets@1", str(folder / "tars"), "webdataset", split="val", workers=1).splits
    assert repo.datasets.verify("pets@1", deep=True).problems == ()
    elsewhere = str(folder / "elsewhere")
    datasvc.open(elsewhere, create=True)
    assert repo.datasets.push(elsewhere, ["pets@1"], with_tags=True, dry_run=True).is_dry_run
    assert repo.datasets.push(elsewhere, ["pets@1"], name="copy").num_objects
    assert [str(copied.target) for copied in repo.datasets.pull(elsewhere, ["copy"], name="pets").versions] == [
        "pets@1"
    ]
    assert repo.datasets.repair("pets@1", [], deep=True).remaining == ()
    assert repo.datasets.delete_damaged("pets", dry_run=True).deleted == {}
    assert len(repo.datasets.open("pets@1")["train"]) == 20
    assert len(repo.dataset("pets@1")["train"]) == 20
    assert repo.dataset("pets@1")["train"].to_arrow(["key"], num_samples=5).num_rows == 5
    assert repo.gc(grace_s=0, no_writers=True, dry_run=True).dry_run
    options = SourceOptions(format="webdataset", split="val")
    assert repo.datasets.attach(str(folder / "tars"), "in-place", source_options=options).num_samples == {"val": 6}
    again = datasvc.ingest(str(images), "again", repo=str(folder / "repo"), keep_order=True)
    assert again.num_samples == {"train": 20, "val": 6}

    assert str(repo.datasets.branch("again", "trial", message="without the first")) == "again@1"
    first = next(repo.datasets.head("again@trial", 1, split="train")).key
    assert repo.datasets.delete("again@trial", keys=[first], message="one fewer").num_deleted == 1
    assert [branch.start.version for branch in repo.datasets.branches("again").values()] == [1]
    assert len(repo.datasets.branch_history("again", "trial")) == 1
    assert repo.datasets.merge("again@trial", "again", message="merged").deleted == {"train": 1}
    assert repo.datasets.remove_branch("again", "trial", message="merged")

    chosen = repo.dataset("again")["train"].where("label = 1")
    repo.datasets.save_view("ones", chosen, message="one class")
    assert list(repo.datasets.views("again")) == ["ones"]
    assert repo.datasets.view("again", "ones").table == chosen.digest
    assert len(repo.dataset("again[ones]")["train"]) == len(chosen)
    repo.datasets.remove_view("again", "ones", message="not needed")
    assert repo.datasets.label("again", "label = 1", "a", split="val", message="corrected").changed
    assert repo.datasets.confusion("again", "label", "label")
    assert repo.datasets.compact("again", message="in shards").version
    last = next(repo.datasets.head("again", 1, split="train")).key
    assert repo.datasets.purge("again", keys=[last], split="train", missing="ok", dry_run=True).num_shards
    assert repo.datasets.certificates("again") == []
    copies = repo.datasets.copies("again")
    assert len(copies) <= len(repo.datasets.copies())
    assert repo.datasets.list_certificates() == []
    with suppress(NotFoundError):
        repo.datasets.certificate("0a")


def use_manager(folder: Path) -> None:
    """Call the methods of `repo.models.manager(...)`."""
    repo = datasvc.open(str(folder / "repo"), create=True)
    net = torch.nn.Linear(2, 1)
    with repo.models.manager("net", every=2, failures="raise", codec="planes", fallback=[repo.repository]) as manager:
        for step in range(1, 5):
            if manager.should_save(step):
                handle: SaveHandle = manager.save({"model": net.state_dict()}, step=step, metrics={"loss": 1 / step})
                assert handle.result().name == "net"
        manager.wait()
        assert manager.newest_step() == 4
        found = manager.restore(default=None)
        assert found is not None
        assert found.entry["step"] == 4
        assert set(manager.restore("net@1", only=["model"]).state) == {"model.weight", "model.bias"}
        assert str(manager.version) == "net@1"
        assert (manager.name, manager.stop_signal, manager.cost.stall_s > 0) == ("net", None, True)
        manager.close()


def use_models(folder: Path) -> None:
    """Call the methods of `repo.models`."""
    repo = datasvc.open(str(folder / "repo"), create=True)
    net = torch.nn.Linear(2, 1)
    state = {"model": net.state_dict(), "step": 7}
    saved = repo.models.save("net", state, step=7, metrics={"loss": 0.1}, config={"lr": 0.1}, parent="net@2", data=())
    assert str(saved) == "net@3"
    assert repo.models.restore(saved, only=["model"], rename={"model": ""}, trusted_keys=()).state.keys()
    assert repo.models.load_into(net, "net@3", prefix="model", strict=True).is_exact
    assert set(repo.models.open_safetensors("net@3").keys()) == set(net.state_dict())

    assert repo.models.names() == ["net"]
    assert [version.version for version in repo.models.ls()] == [3]
    assert [version.version for version in repo.models.log("net", last=2)] == [2, 3]
    assert repo.models.log("net").to_arrow()["version"].to_pylist() == ["net@1", "net@2", "net@3"]
    assert [line.version.version for line in repo.models.history("net", last=1) if line.version] == [3]
    assert repo.models.describe("net@3").entry["step"] == 7
    assert repo.models.stored_size("net@3").num_chunks
    assert repo.models.sql("select max(metrics.loss) as loss from versions").num_rows == 1
    found = repo.models.find("metrics.loss < 0.5", by="loss", ascending=True, limit=5)
    assert [version.version for version in repo.models.describe_versions(found)] == [3, 2]
    assert repo.models.best("net", "loss", mode="min") == repo.models.resolve("net@best:loss") == found[0]
    assert repo.models.diff("net@2", "net@3", norms=True).steps == (4, 7)
    compared = repo.models.compare(["net@2", "net@3"], equal=False)
    assert (compared.versions, compared.values[0].values) == (("net@2", "net@3"), {"net@2": 4, "net@3": 7})
    assert repo.models.trained_on(["net"], keys=["train/a/00000"]).versions
    assert repo.models.lineage("net@3").models
    with suppress(ConfigError):  # what it was trained on is not recorded
        repo.models.plan_forget("net@3", ["train/a/00000"], missing="ok")
    with suppress(NotFoundError):
        repo.models.find_evaluated("net@3", data="pets@1", split="val")
    with suppress(ConfigError, NotFoundError):
        repo.models.batch_at("net@3", 1, rank=0)

    assert repo.models.tag("net@3", "prod", expect=0).version == 3
    assert repo.models.resolve("net@prod") == repo.models.versions("net")[-1]
    assert repo.models.tags("net") == {"prod": 3}
    assert len(repo.models.tag_history("net", "prod")) == 1

    public = make_key(folder / "key")
    assert repo.models.sign("net@3", load_private_key(folder / "key")).key_id == public.id
    assert repo.models.signers("net@3") == [public.id]
    assert repo.models.verify("net@prod", deep=True, trusted_keys=[public.source]).problems == ()

    attached = repo.models.attach("net@3", public.source, name="key.pub", details={"use": "signatures"})
    assert [artefact.digest for artefact in repo.models.artefacts("net@3")] == [attached.digest]
    assert repo.models.fetch_artefacts("net@3", folder / "artefacts", ["key.pub"])[0].is_file()
    assert repo.models.detach("net@3", "key.pub").size_bytes == attached.size_bytes

    backup = str(folder / "backup")
    datasvc.open(backup, create=True)
    assert repo.models.push(backup, ["net@3"], name="copy", with_parents=False).num_objects
    assert [str(copied.target) for copied in repo.models.pull(backup, ["copy"]).versions] == ["copy@1"]
    assert repo.models.repair(repo.models.versions("net"), [backup], deep=False).remaining == ()

    assert repo.models.export("net@3", folder / "files", "safetensors", dtype="float32").num_tensors == 2
    assert repo.models.export_distributed("net@3", folder / "joint", dtype="float32").num_tensors == 2
    assert repo.models.import_(folder / "files", "imported", step=7, message="from files").num_tensors == 2
    inputs = [torch.zeros(2, 2)]
    assert repo.models.export_onnx("net@3", folder / "onnx", net, inputs, dynamic_batch=True).files

    _, plan = repo.models.retain("net", RetentionPolicy(last=1), dry_run=True)
    repo.models.untag("net", "prod")
    assert repo.models.remove(["net@1"], message="not needed").versions
    assert plan.removed
    Path(repo.repository.storage.location("models/net/versions/00000002.json")).write_text("damaged")
    lost = repo.models.mark_lost(["net@2"], force=True, message="disk failure")
    assert repo.models.lost_versions(["net"]) == list(lost.versions)


def use_runs(folder: Path) -> None:
    """Call the methods of `repo.runs`."""
    repo = datasvc.open(str(folder / "repo"), create=True)
    with repo.runs.start("net", config={"lr": 0.1}, data="pets@1", parent="net@3", facts={"why": "a test"}) as log:
        log.report("step", step=1, loss=0.5)
        assert log.flush()
        history = repo.runs.read(log.ref)
        log.report("step", step=2, loss=0.25)
    assert repo.runs.follow(log.ref, history.cursor).series["loss"].values.tolist() == [0.25]
    assert [run.ref for run in repo.runs.ls("net", last=1)] == [log.ref]
    train = repo.dataset("again@1")["train"]
    with ImageLoader(train, batch_size=4, training=True, size=8) as loader:
        repo.runs.record(log.ref, loader, name="loss")
        for batch in loader:
            loader.record(batch, torch.ones(4))
    assert repo.runs.signals(log.ref) == ["loss"]
    assert np.nanmax(repo.runs.signal(log.ref, train, "loss", reduce="last")) == 1
    assert repo.runs.signal_summary(log.ref, "loss", count=1).largest[0].value == 1
    assert repo.runs.signal_table(log.ref, "again", "loss", reduce="mean").num_rows == 20


def use_loaders(folder: Path) -> None:
    """Train in the loop of README.md."""
    repo = datasvc.open(str(folder / "repo"))
    train = repo.dataset("again@1")["train"]
    cache = Cache(folder / "cache", budget="10MB")
    hvd.init()
    net = torch.nn.Linear(3 * 8 * 8, 4)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1), net.named_parameters())
    assert_type(optimizer, torch.optim.SGD)
    with ImageLoader(train, batch_size=4, training=True, cache=cache, size=8) as loader:
        for images, labels in loader:
            assert_type(images, torch.Tensor)
            assert_type(labels, torch.Tensor)
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(images.flatten(1)), labels).backward()  # type: ignore[no-untyped-call]  # of torch
            optimizer.step()
            state = loader.state_dict()
        for batch in loader:
            assert_type(batch[1], torch.Tensor)
            assert_type(batch.labels, torch.Tensor | None)
        for arrays, _ in loader.numpy():
            assert arrays.astype(np.float64).shape == (4, 3, 8, 8)
        loader.load_state_dict(state)
    cache.close()


def main(folder: Path, images: Path) -> None:
    """Use a new repository in `folder`, with the data set of an image folder."""
    use_datasets(folder, images)
    use_loaders(folder)
    use_manager(folder)
    use_models(folder)
    use_runs(folder)
