"""Artefacts: files attached to a version come back equal, live as long as it does, and go where it goes."""

import json

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import datasvc
from datasvc.api.gc import gc
from datasvc.errors import ConfigError, ConflictError, CorruptDataError, NotFoundError
from datasvc.models import restore, save
from datasvc.models.interop.artefact_files import attach, fetch_artefacts, read_onnx_details
from datasvc.models.registry.verify import repair, verify
from datasvc.models.transfer import transfer
from datasvc.models.versions.artefacts import artefact_log, artefacts, detach, read_artefacts
from datasvc.models.versions.signing import load_private_key, make_key, sign
from datasvc.repository import Repository
from datasvc.repository.objects.objects import Objects
from datasvc.repository.removal import remove_versions
from tests.cli.command import run
from tests.models.every_kind import copy_of, flip


@pytest.fixture
def net(repository):
    for step in range(2):
        save(repository, "net", {"w": torch.full((3,), float(step))}, step=step)
    return repository


@pytest.fixture
def onnx_file(tmp_path):
    from onnx import TensorProto, helper

    inputs, output = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "relu", [inputs], [output])
    opsets = [helper.make_opsetid("custom.domain", 3), helper.make_opsetid("", 18)]
    model = helper.make_model(graph, opset_imports=opsets, producer_name="tests", ir_version=9)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


def sweep(repository):
    return gc(repository, dry_run=False, grace_s=0, no_writers=True)


def path_of(repository, digest):
    return repository.storage.local_path(Objects.path(digest))


def test_a_file_comes_back_equal_and_is_listed_with_its_opset(net, onnx_file, tmp_path):
    attached = attach(net, "net@1", onnx_file, details={"precision": "fp32"}, message="for serving")
    assert artefacts(net, "net@1") == [attached]
    assert artefacts(net, "net@2") == []
    assert (attached.name, attached.format, attached.message) == ("model.onnx", "onnx", "for serving")
    assert attached.details == {"opset": 18, "ir_version": 9, "producer": "tests", "precision": "fp32"}
    assert attached.size_bytes == onnx_file.stat().st_size
    (fetched,) = fetch_artefacts(net, "net@1", tmp_path / "out")
    assert (fetched, fetched.read_bytes()) == (tmp_path / "out/model.onnx", onnx_file.read_bytes())
    with pytest.raises(NotFoundError, match=r"net@1 has no artefact 'x'; it has: model\.onnx"):
        fetch_artefacts(net, "net@1", tmp_path / "other", ["x"])
    with pytest.raises(NotFoundError, match="net@2 has no artefacts; datasvc models attach"):
        fetch_artefacts(net, "net", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_folder_keeps_its_files_and_their_places(net, tmp_path):
    files = {"graph.pb": b"graph", "variables/data": b"1234", "variables/empty": b""}
    for path, content in files.items():
        (tmp_path / "saved" / path).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "saved" / path).write_bytes(content)
    attached = attach(net, "net", tmp_path / "saved", name="tf", format="savedmodel")
    assert (attached.format, sorted(attached.files)) == ("savedmodel", sorted(files))
    assert attach(net, "net@1", tmp_path / "saved").digest == attached.digest
    fetch_artefacts(net, "net", tmp_path / "out", ["tf"])
    assert {path: (tmp_path / "out/tf" / path).read_bytes() for path in files} == files
    (tmp_path / "saved/.hidden").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"'\.hidden' is not a valid path"):
        attach(net, "net", tmp_path / "saved", name="other")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ConfigError, match="has no files to attach"):
        attach(net, "net", tmp_path / "nothing")
    with pytest.raises(NotFoundError, match="gone does not exist"):
        attach(net, "net", tmp_path / "gone")


def test_a_name_is_given_once_until_it_is_detached(net, tmp_path):
    file = tmp_path / "plan.engine"
    file.write_bytes(b"one")
    attached = attach(net, "net@2", file)
    assert attach(net, "net@2", file) == attached
    assert artefact_log(net, "net").numbers() == [1]
    file.write_bytes(b"two")
    with pytest.raises(ConflictError, match=r"net@2 has another artefact 'plan\.engine'"):
        attach(net, "net@2", file)
    assert detach(net, "net@2", "plan.engine") == attached
    with pytest.raises(NotFoundError, match=r"has no artefact 'plan\.engine'"):
        detach(net, "net@2", "plan.engine")
    assert attach(net, "net@2", file).digest != attached.digest
    assert attached.format == "tensorrt"


def test_gc_keeps_what_is_attached_to_a_version_that_is_not_removed(net, tmp_path):
    digests = {}
    for ref, content in (("net@1", b"first"), ("net@2", b"second"), ("net@2", b"third")):
        file = tmp_path / content.decode()
        file.write_bytes(content)
        digests[content] = attach(net, ref, file).digest
    detach(net, "net@2", "third")
    remove_versions(net, "models", ["net@1"])
    deleted = {info.digest for info in sweep(net).objects}
    assert {content for content, digest in digests.items() if digest in deleted} == {b"first", b"third"}
    assert path_of(net, digests[b"second"]).read_bytes() == b"second"
    # An entry that cannot be read may name anything.
    flip(net.storage.local_path(artefact_log(net, "net").path_of(2)), 60)
    with pytest.raises(CorruptDataError, match=r"00000002\.json.* it may name artefacts of net") as caught:
        sweep(net)
    assert "Nothing was deleted" in str(caught.value)


def test_artefacts_are_verified_and_repaired(net, onnx_file, tmp_path):
    digest = attach(net, "net@1", onnx_file).digest
    assert verify(net, ["net@1", "net@2"]).problems == ()
    backup = copy_of(net, tmp_path / "backup")
    flip(path_of(net, digest), 10)
    with pytest.raises(CorruptDataError):
        fetch_artefacts(net, "net@1", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert verify(net, "net@2").problems == ()
    (problem,) = verify(net, ["net@1", "net@2"]).problems
    assert (problem.role, problem.kind, problem.digest) == ("artefact", "changed", digest)
    assert problem.hit == {"net@1": ("model.onnx",)}
    repair(net, [problem], [backup])
    assert fetch_artefacts(net, "net@1", tmp_path / "out")[0].read_bytes() == onnx_file.read_bytes()
    flip(net.storage.local_path(artefact_log(net, "net").path_of(1)), 60)
    (problem,) = verify(net, ["net@1", "net@2"]).problems
    assert (problem.role, problem.kind) == ("entry", "changed")


def test_a_push_carries_artefacts_also_those_attached_later(net, onnx_file, tmp_path):
    target = Repository.create(str(tmp_path / "target"))
    attach(net, "net@2", onnx_file, message="kept")
    transfer(net, target, ["net@2"], name="copy")
    (copied,) = artefacts(target, "copy@1")
    assert (copied.name, copied.message, copied.details["opset"]) == ("model.onnx", "kept", 18)
    sweep(target)
    assert fetch_artefacts(target, "copy", tmp_path / "out")[0].read_bytes() == onnx_file.read_bytes()
    other = tmp_path / "later"
    other.write_bytes(b"later")
    attach(net, "net@2", other)
    report = transfer(net, target, ["net@2"], name="copy")
    assert (report.num_objects, report.bytes, [done.is_new for done in report.versions]) == (1, 5, [False])
    assert [artefact.name for artefact in artefacts(target, "copy@1")] == ["later", "model.onnx"]
    assert transfer(net, target, ["net@2"], name="copy").num_objects == 0
    assert artefact_log(target, "copy").numbers() == [1, 2]
    detach(net, "net@2", "later")
    other.write_bytes(b"changed")
    attach(net, "net@2", other)
    with pytest.raises(ConflictError, match=r"copy@1 at the target has another artefact 'later' than net@2"):
        transfer(net, target, ["net@2"], name="copy")


def test_a_signature_does_not_cover_artefacts(net, onnx_file, tmp_path):
    key = make_key(tmp_path / "key")
    sign(net, "net@1", load_private_key(tmp_path / "key"))
    attach(net, "net@1", onnx_file)
    assert restore(net, "net@1", trusted_keys=[key.source]).state["w"].tolist() == [0.0] * 3
    target = Repository.create(str(tmp_path / "target"))
    transfer(net, target, ["net@1"], trusted_keys=[key.source])
    assert artefacts(target, "net@1") == []


@pytest.mark.parametrize(
    "change",
    [
        {"version": "1"},
        {"name": "../x"},
        {"name": 5},
        {"files": {"../x": {"digest": "0" * 64, "bytes": 1}}},
        {"files": {"a/../../x": {"digest": "0" * 64, "bytes": 1}}},
        {"files": {"x": {"digest": "0" * 63, "bytes": 1}}},
        {"files": 5},
        {"files": {"x": None}},
    ],
)
def test_an_entry_that_names_no_artefact_is_corrupt(net, change):
    content = {"version": 1, "name": "x", "file_format": "f", "files": {"x": {"digest": "0" * 64, "bytes": 1}}}
    artefact_log(net, "net").append(lambda _: {**content, **change})
    with pytest.raises(CorruptDataError, match="entry 1 of the artefacts of net is not valid"):
        read_artefacts(net, "net")


@given(raw=st.binary(max_size=200), cut=st.integers(0, 60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_an_onnx_file_or_not(onnx_file, tmp_path, raw, cut):
    (tmp_path / "any").write_bytes(raw)
    assert isinstance(read_onnx_details(tmp_path / "any"), dict)
    (tmp_path / "cut").write_bytes(onnx_file.read_bytes()[:cut] + raw)
    assert isinstance(read_onnx_details(tmp_path / "cut"), dict)


def test_the_commands_attach_show_fetch_and_detach(net, onnx_file, tmp_path):
    def command(*words):
        done = run("models", *words, DATASVC_REPO=net.url)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "attached relu to net@2: onnx, digest " in command("attach", "net", onnx_file, "--name", "relu")
    digest = artefacts(net, "net@2")[0].digest
    (line,) = [line for line in command("show", "net@2").splitlines() if "artefact relu" in line]
    assert all(text in line for text in ("onnx", "opset 18", "ir_version 9", "producer tests"))
    assert digest in line
    (shown,) = json.loads(command("show", "net@2", "--json"))["artefacts"]
    assert (shown["digest"], shown["format"], shown["details"]["opset"]) == (digest, "onnx", 18)
    assert command("fetch", "net@2", tmp_path / "out", "--name", "relu").split() == [str(tmp_path / "out/relu")]
    assert (tmp_path / "out/relu").read_bytes() == onnx_file.read_bytes()
    assert "detached relu from net@2" in command("detach", "net@2", "relu")
    assert "artefact" not in command("show", "net@2")
    repo = datasvc.open(net.url)
    assert (repo.models.artefacts("net@2"), repo.models.attach("net", onnx_file).version.version) == ([], 2)
