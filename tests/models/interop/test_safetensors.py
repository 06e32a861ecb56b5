import json
import subprocess
import sys
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from datasvc.errors import ConfigError, CorruptDataError, DatasvcError, NotFoundError
from datasvc.models import restore, save
from datasvc.models.interop import export_model, import_model
from datasvc.models.interop.safetensors_header import DTYPES, MAX_HEADER_BYTES, encode_header, read_header
from datasvc.models.tensors.tensor_table import ITEM_BYTES
from tests.examples import examples
from tests.models.stored import flip_last_byte, object_file


class Sizes(NamedTuple):
    height: int
    width: int


EVERY_DTYPE = {name: (torch.arange(6) % 2).to(getattr(torch, dtype)).reshape(2, 3) for name, dtype in DTYPES.items()}
WEIGHTS = {
    "layer.weight": torch.randn(128, 300),
    "layer.bias": torch.ones(300),
    "head.weight": torch.ones(30, 300),
    "step": torch.tensor(7),
    "empty": torch.empty(0, 3),
}


def equal(a, b):
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and a[name].shape == b[name].shape
        and torch.equal(a[name].contiguous().view(torch.uint8), b[name].contiguous().view(torch.uint8))
        for name in a
        if a[name].dim()
    )


def file_of(header, content=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + content


def entry(offsets, shape=(2,), dtype="F32"):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


TWICE = b'{"a":%s,"a":%s}' % (json.dumps(entry((0, 8))).encode(), json.dumps(entry((8, 16))).encode())


def test_a_file_of_every_dtype_is_imported_and_exported_unchanged(repository, tmp_path):
    save_file(EVERY_DTYPE, tmp_path / "in.safetensors")
    done = import_model(repository, tmp_path / "in.safetensors", "m")
    assert (done.format, done.num_tensors, done.ignored) == ("safetensors", len(DTYPES), ())
    assert equal(restore(repository, "m").state["model"], EVERY_DTYPE)
    export_model(repository, "m", tmp_path / "out", "huggingface")
    path = tmp_path / "out" / "model.safetensors"
    assert equal(load_file(path), EVERY_DTYPE)
    assert all(each.offset % ITEM_BYTES[each.dtype] == 0 for each in read_header(path))


def test_shards_with_an_index_go_out_and_in_again(repository, tmp_path):
    save(repository, "m", {"model": WEIGHTS, "optimizer": {"lr": 0.1, "m": torch.ones(3)}}, step=1)
    done = export_model(repository, "m", tmp_path / "hub", "huggingface", max_shard_bytes=40_000)
    index = json.loads((tmp_path / "hub" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == done.bytes == sum(each.nbytes for each in WEIGHTS.values())
    assert set(index["weight_map"]) == set(WEIGHTS)
    assert len(set(index["weight_map"].values())) == len(done.files) - 1 == 3
    for name, file in index["weight_map"].items():
        with safe_open(tmp_path / "hub" / file, "pt") as opened:
            assert torch.equal(opened.get_tensor(name), WEIGHTS[name])
            assert opened.metadata() == {"format": "pt"}
    again = import_model(repository, tmp_path / "hub", "n")
    assert again.format == "huggingface"
    assert again.new_bytes < 5_000  # small tensors share a pack, of each save its own
    assert equal(restore(repository, "n").state["model"], WEIGHTS)


@pytest.mark.parametrize("more", ["1", "Infinity", '"' + "x" * (1 << 20) + '"'])
def test_a_configuration_that_came_along_goes_along(repository, tmp_path, more):
    (tmp_path / "hub").mkdir()
    save_file(WEIGHTS, tmp_path / "hub" / "model.safetensors")
    config = f'{{"model_type":   "bert", "torch_dtype": "float32", "more": {more}}}'
    (tmp_path / "hub" / "config.json").write_text(config)
    import_model(repository, tmp_path / "hub", "m")
    export_model(repository, "m", tmp_path / "out", "huggingface")
    assert (tmp_path / "out" / "config.json").read_text() == config
    export_model(repository, "m", tmp_path / "half", "huggingface", dtype="bfloat16")
    told = json.loads((tmp_path / "half" / "config.json").read_text())
    assert told == {**json.loads(config), "torch_dtype": "bfloat16"}
    kept = repository.entry(repository.resolve("models", "m")).content["config"]
    assert (kept.get("huggingface", {}).get("model_type") == "bert") == (more == "1")


def test_the_small_files_of_a_folder_go_out_again_and_the_rest_is_named(repository, tmp_path):
    hub = tmp_path / "hub"
    (hub / "onnx").mkdir(parents=True)
    save_file(WEIGHTS, hub / "model.safetensors")
    for name in (
        "tokenizer.json",
        "README.md",
        "pytorch_model.bin",
        "training_args.bin",
        "tf_model.h5",
        ".gitattributes",
    ):
        (hub / name).write_text(f"the {name}")
    with (hub / "large.json").open("wb") as file:
        file.truncate(65 << 20)
    report = import_model(repository, hub, "m")
    assert report.files == ("README.md", "tokenizer.json")
    left_out = (".gitattributes", "large.json", "onnx", "pytorch_model.bin", "tf_model.h5", "training_args.bin")
    assert report.left_out == left_out
    done = export_model(repository, "m", tmp_path / "out", "huggingface")
    assert [file.name for file in done.files] == ["README.md", "model.safetensors", "tokenizer.json"]
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "the tokenizer.json"


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_folder_with_weights_of_torch_save_is_imported(repository, tmp_path, is_sharded):
    hub, names = tmp_path / "hub", sorted(WEIGHTS)
    hub.mkdir()
    files = {"pytorch_model.bin": names}
    if is_sharded:
        files = {"pytorch_model-1.bin": names[:2], "pytorch_model-2.bin": names[2:]}
        weight_map = {name: file for file, stored in files.items() for name in stored}
        (hub / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for file, stored in files.items():
        torch.save({name: WEIGHTS[name] for name in stored}, hub / file)
    (hub / "config.json").write_text('{"model_type": "bert"}')
    report = import_model(repository, hub, "m")
    assert (report.format, report.files, report.left_out) == ("huggingface", ("config.json",), ())
    found = restore(repository, "m")
    assert equal(found.state["model"], WEIGHTS)
    assert found.entry["config"]["huggingface"] == {"model_type": "bert"}


def test_an_entry_cannot_make_an_export_write_elsewhere(repository, tmp_path):
    save(repository, "m", {"model": WEIGHTS}, step=0)
    digest = repository.objects.put(b"evil").digest
    entry = repository.entry(repository.resolve("models", "m")).content
    files = {"../outside": str(digest), "/etc/x": str(digest), "model.safetensors": str(digest)}
    version = repository.versions("models", "m").append(lambda _: {**entry, "imported": {"files": files}}).number
    done = export_model(repository, f"m@{version}", tmp_path / "out", "huggingface")
    assert [file.name for file in done.files] == ["model.safetensors"]
    assert (tmp_path / "out" / "model.safetensors").stat().st_size > 1000


def test_a_configuration_too_large_to_keep_is_refused(repository, tmp_path):
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    with (tmp_path / "config.json").open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(ConfigError, match="move it out of the folder"):
        import_model(repository, tmp_path, "m")


def test_a_cast_that_would_make_infinities_and_a_name_that_is_taken_are_refused(repository, tmp_path):
    save(repository, "m", {"model": {"w": torch.tensor([1e6, 1.0]), "__metadata__": torch.ones(1)}}, step=0)
    with pytest.raises(ConfigError, match=r"1 of 2 numbers of tensor 'model.w' are too large for float16"):
        export_model(repository, "m", tmp_path / "out", dtype="float16")
    with pytest.raises(ConfigError, match="cannot have the name __metadata__"):
        export_model(repository, "m", tmp_path / "out", "huggingface")
    assert not (tmp_path / "out").exists()


def test_a_whole_checkpoint_comes_back_as_it_was(repository, tmp_path):
    state = {"model": WEIGHTS, "optimizer": {0: (torch.ones(2), 0.5, None)}, "name": "x", "$odd": [float("inf")]}
    state |= {"ordered": OrderedDict(a=Sizes(1, 2)), "tied": next(iter(WEIGHTS.values()))}
    save(repository, "m", state, step=4)
    export_model(repository, "m", tmp_path / "out")
    import_model(repository, tmp_path / "out", "n")
    a, b = (repository.entry(repository.resolve("models", name)).content for name in ("m", "n"))
    assert (a["tensors"], a["state"]) == (b["tensors"], b["state"])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ('{"x": {"$tensor": "zzz"}}', "tensor.* is damaged"),
        ('{"x": ' + "[" * 200 + "]" * 200 + "}", "nested deeper"),
        ("{}", "tensor 'a' 0 times"),
        ('{"x": {"$tensor": "a"}, "y": {"$tensor": "a"}}', "tensor 'a' 2 times"),
        ('{"$dict": [["x", {"$tensor": "a"}], ["x", 1]]}', "tensor 'a' 0 times"),
        ('{"x": {"$tensor": "a"}, "y": NaN}', "NaN is not valid JSON"),
        ('{"x": {"$tensor": "a"}, "y": 1e999}', "cannot be stored"),
        ('{"x": {"$tensor": "a"}, "y": {"$float": ' + "9" * 400 + "}}", "too large"),
    ],
)
def test_a_state_that_is_none_is_refused_before_anything_is_stored(repository, tmp_path, state, message):
    save_file({"a": torch.ones(2000)}, tmp_path / "tensors.safetensors")
    (tmp_path / "state.json").write_text(state)
    with pytest.raises((ConfigError, CorruptDataError), match=message):
        import_model(repository, tmp_path, "m")
    assert not (tmp_path / "repo" / "objects").exists()


def test_a_prefix_may_look_like_a_mark(repository, tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    import_model(repository, tmp_path / "x.safetensors", "m", prefix="$m")
    assert torch.equal(restore(repository, "m").state["$m"]["a"], torch.ones(2))


@pytest.mark.parametrize("codec", ["none", "delta"])
def test_a_parent_that_is_not_there_is_refused_before_anything_is_read(repository, tmp_path, codec):
    for parent in ("nosuch@99", "nosuch"):
        with pytest.raises(NotFoundError, match="nosuch"):
            import_model(repository, tmp_path / "no file", "m", parent=parent, codec=codec)
    save_file({"a": torch.ones(2)}, tmp_path / "x.safetensors")
    import_model(repository, tmp_path / "x.safetensors", "m")
    import_model(repository, tmp_path / "x.safetensors", "m", parent="m", codec=codec)
    assert repository.entry(repository.resolve("models", "m@2")).content["parent"] == "m@1"


def test_a_part_under_other_names_and_in_another_dtype_goes_out_and_in(repository, tmp_path):
    save(repository, "m", {"model": WEIGHTS}, step=1)
    only, rename = ["model.layer.*", "model.step"], {"model.layer": "body"}
    export_model(repository, "m", tmp_path / "out", only=only, rename=rename, dtype="bfloat16")
    found = load_file(tmp_path / "out" / "tensors.safetensors")
    assert {name: str(each.dtype) for name, each in found.items()} == {
        "body.weight": "torch.bfloat16",
        "body.bias": "torch.bfloat16",
        "model.step": "torch.int64",
    }
    assert torch.equal(found["body.bias"], WEIGHTS["layer.bias"].bfloat16())
    import_model(repository, tmp_path / "out", "n", exclude=["body.bias"], rename={"body": "model.layer"})
    assert sorted(restore(repository, "n").state) == ["model.layer.weight", "model.step"]


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"", ConfigError, "neither a safetensors file"),
        (b"\x10\0\0", ConfigError, "neither a safetensors file"),
        (file_of({"a": entry((0, 8))}, b"\0" * 7), CorruptDataError, "not fully covered"),
        (file_of({"a": entry((0, 8))}, b"\0" * 9), CorruptDataError, "not fully covered"),
        (
            file_of({"a": entry((0, 8)), "b": entry((4, 12))}, b"\0" * 12),
            CorruptDataError,
            "invalid offset for tensor `b`",
        ),
        (
            file_of({"a": entry((0, 8)), "b": entry((12, 20))}, b"\0" * 20),
            CorruptDataError,
            "invalid offset for tensor `b`",
        ),
        (file_of({"a": entry((8, 0))}, b"\0" * 8), CorruptDataError, "invalid offset for tensor `a`"),
        (file_of({"a": entry((-8, 0))}, b"\0" * 8), CorruptDataError, "JSON in header: invalid value"),
        (file_of({"a": entry((0, 8), [2, True])}, b"\0" * 8), CorruptDataError, "JSON in header: invalid type"),
        (
            file_of({"a": entry((0, 8), [1 << 59] * 60)}, b"\0" * 8),
            CorruptDataError,
            "overflow computing buffer size",
        ),
        (file_of({"a": entry((0, 8), [16], "F4")}, b"\0" * 8), ConfigError, "dtype 'F4', which is not supported"),
        (file_of({"a": entry((0, 8), dtype="X1")}, b"\0" * 8), CorruptDataError, "unknown variant `X1`"),
        (file_of({"a": entry((0, 8), [2] + [1] * 64)}, b"\0" * 8), CorruptDataError, "has 65 dimensions"),
        (file_of({"a": entry((0, 8), dtype=3)}, b"\0" * 8), CorruptDataError, "JSON in header: invalid type"),
        (file_of({"": entry((0, 8))}, b"\0" * 8), CorruptDataError, "is not a valid name of a tensor"),
        (file_of(b'{"\\ud800":{}}'), CorruptDataError, "unexpected end of hex escape"),
        (file_of(TWICE, b"\0" * 16), CorruptDataError, "not fully covered|invalid offset"),
        (file_of(b"{" + b'"a":[' * 5000), CorruptDataError, "invalid JSON in header"),
        (file_of(b'{"a":' + b"1" * 9000 + b"}"), CorruptDataError, "invalid JSON in header"),
        (file_of(b"{1}"), CorruptDataError, "invalid JSON in header"),
        ((1 << 62).to_bytes(8, "little") + b"{}", CorruptDataError, "header too large"),
    ],
)
def test_a_file_that_lies_is_refused_and_leaves_nothing(repository, tmp_path, content, error, message):
    (tmp_path / "x.bin").write_bytes(content)
    with pytest.raises(error, match=message):
        import_model(repository, tmp_path / "x.bin", "m")
    assert repository.names("models") == []


def test_a_header_that_would_fill_the_memory_is_not_read(repository, tmp_path):
    with (tmp_path / "x.safetensors").open("wb") as file:
        file.write((MAX_HEADER_BYTES + 8).to_bytes(8, "little") + b"{")
        file.truncate(MAX_HEADER_BYTES + 100)
    with pytest.raises(CorruptDataError, match=r"at most .* are supported"):
        import_model(repository, tmp_path / "x.safetensors", "m")


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/x.safetensors", "a/b.safetensors", "model.bin", 3])
def test_an_index_cannot_point_out_of_its_folder(repository, tmp_path, name):
    save_file(WEIGHTS, tmp_path / "secret.safetensors")
    (tmp_path / "hub").mkdir()
    index = {"weight_map": dict.fromkeys(WEIGHTS, name)}
    (tmp_path / "hub" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CorruptDataError, match="in the same folder"):
        import_model(repository, tmp_path / "hub", "m")


def test_index_and_files_must_agree(repository, tmp_path):
    save_file({"a": torch.ones(2), "b": torch.ones(3)}, tmp_path / "1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors", "c": "1.safetensors"}}))
    with pytest.raises(CorruptDataError, match="does not have tensor 'c'"):
        import_model(repository, tmp_path, "m")
    index.write_text(json.dumps({"weight_map": {"a": "1.safetensors"}}))
    assert import_model(repository, tmp_path, "m").ignored == ("b",)


@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_imported_as_it_is_or_refused_in_our_words(repository, tmp_path, data):
    header = encode_header([("a", "float32", (2, 3)), ("b", "int8", (5,))], {})
    content = bytearray(header + bytes(range(29)))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path / "x.safetensors"
    path.write_bytes(bytes(content[: data.draw(st.integers(0, len(content)))]))
    try:
        import_model(repository, path, "m", codec="none")
    except DatasvcError:
        return
    assert sum(each.nbytes for each in restore(repository, "m").state["model"].values()) <= len(content)


def test_an_export_that_fails_leaves_nothing(repository, tmp_path):
    save(repository, "m", {"model": WEIGHTS, "z": torch.ones(2, dtype=torch.complex128)}, step=0)
    with pytest.raises(ConfigError, match="does not support the dtype complex128 of tensor 'z'"):
        export_model(repository, "m", tmp_path / "out")
    flip_last_byte(object_file(repository, "m", "model.layer.weight"))
    with pytest.raises(CorruptDataError, match=r"layer.weight"):
        export_model(repository, "m", tmp_path / "out", "huggingface")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "x").touch()
    with pytest.raises(ConfigError, match="is not empty"):
        export_model(repository, "m", tmp_path / "mine", only=["model"])
    assert {path.name for path in tmp_path.iterdir()} == {"repo", "mine"}


IMPORT_LARGE = """
import resource, sys
from datasvc.repository import Repository
from datasvc.models.interop import import_model
import torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
import_model(Repository.open(sys.argv[1]), sys.argv[2], "m", codec="none")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.slow
def test_the_memory_of_an_import_does_not_grow_with_the_file(repository, tmp_path):
    with (tmp_path / "large.safetensors").open("wb") as file:
        header = encode_header([("w", "float32", (400, 1 << 18))], {})
        file.write(header)
        file.truncate(len(header) + (400 << 20))  # zeros that take no disk
    words = [sys.executable, "-c", IMPORT_LARGE, repository.url, str(tmp_path / "large.safetensors")]
    grown_kb = int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    assert grown_kb < 250 << 10
