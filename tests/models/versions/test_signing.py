import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed448
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from datasvc.errors import ConfigError, ConflictError, CorruptDataError
from datasvc.models import restore, save
from datasvc.models.interop.exporting import export_model
from datasvc.models.restoring.load_into_module import load_version_into
from datasvc.models.versions.signing import (
    load_private_key,
    load_public_keys,
    make_key,
    sign,
    signed_message,
    trusted_keys,
)
from datasvc.repository import Resolved
from datasvc.repository.logs.log import decode_entry, encode_entry


@pytest.fixture
def key(tmp_path):
    return make_key(tmp_path / "key.pem")


@pytest.fixture
def signed(repository, tmp_path, key):
    save(repository, "m", {"w": torch.arange(4.0)}, step=1, metrics={"acc": 0.5}, message="größer")
    sign(repository, "m", load_private_key(tmp_path / "key.pem"))
    return repository


def entry_path(repository, name="m", version=1):
    return repository.storage.local_path(f"models/{name}/versions/{version:08d}.json")


def signature_paths(repository, name="m"):
    return sorted(repository.storage.local_path(f"models/{name}/signatures").iterdir())


def change_entry(repository, **changes):
    """Change an entry as somebody does who knows how its checksum is made."""
    path = entry_path(repository)
    path.write_bytes(encode_entry({**decode_entry(path.read_bytes(), "x"), **changes}))


def test_a_signed_version_restores_and_an_unsigned_one_is_refused(signed, key):
    assert restore(signed, "m", trusted_keys=[key.source]).state["w"].tolist() == [0, 1, 2, 3]
    save(signed, "m", {"w": torch.zeros(1)}, step=2)
    with pytest.raises(CorruptDataError, match=rf"m@2 is not trusted.*{key.id}.*it was not signed.*models sign m@2"):
        restore(signed, "m", trusted_keys=[key.source])
    assert restore(signed, "m@2", trusted_keys=()).state["w"].tolist() == [0]


def test_the_environment_names_the_keys_for_every_restore(signed, key, monkeypatch):
    save(signed, "m", {"w": torch.zeros(1)}, step=2)
    restore(signed, "m@2")
    monkeypatch.setenv("DATASVC_TRUSTED_KEYS", f"{key.source}:{key.source}")
    restore(signed, "m@1")
    with pytest.raises(CorruptDataError, match="not trusted"):
        restore(signed, "m@2")
    monkeypatch.setenv("DATASVC_TRUSTED_KEYS", "/nowhere/key.pub")
    with pytest.raises(ConfigError, match=r"/nowhere/key\.pub"):
        restore(signed, "m@1")
    for nothing in ("", ":"):
        monkeypatch.setenv("DATASVC_TRUSTED_KEYS", nothing)
        with pytest.raises(ConfigError, match="DATASVC_TRUSTED_KEYS names no file"):
            restore(signed, "m@2")
        assert restore(signed, "m@2", trusted_keys=()).version.version == 2


def test_a_model_is_loaded_and_a_file_written_from_signed_versions_only(signed, key, tmp_path):
    save(signed, "m", {"w": torch.zeros(4)}, step=2)
    model = torch.nn.ParameterDict({"w": torch.nn.Parameter(torch.full((4,), 7.0))})
    known = {"trusted_keys": [key.source]}
    with pytest.raises(CorruptDataError, match="m@2 is not trusted"):
        load_version_into(signed, model, "m@2", prefix="", **known)
    assert model["w"].tolist() == [7] * 4
    with pytest.raises(CorruptDataError, match="m@2 is not trusted"):
        export_model(signed, "m@2", tmp_path / "out", format="safetensors", **known)
    assert not (tmp_path / "out").exists()
    load_version_into(signed, model, "m@1", prefix="", **known)
    assert model["w"].tolist() == [0, 1, 2, 3]
    export_model(signed, "m@1", tmp_path / "out", format="safetensors", **known)
    assert (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes", [{"tensors": "0" * 64}, {"metrics": {"acc": 0.9}}, {"commit": "1" * 32}, {"more": 1}]
)
def test_whatever_of_the_entry_changes_breaks_the_signature(signed, key, changes):
    change_entry(signed, **changes)
    with pytest.raises(CorruptDataError, match="does not match the stored entry"):
        restore(signed, "m", trusted_keys=[key.source])


def test_an_entry_that_is_only_written_otherwise_stays_signed(signed, key):
    path = entry_path(signed)
    path.write_text(json.dumps(json.loads(path.read_text()), separators=(",", ":")))
    restore(signed, "m", trusted_keys=[key.source])


def test_a_signature_belongs_to_one_number_and_one_name(signed, key):
    for name, version in (("m", 2), ("other", 1)):
        entry, signature = entry_path(signed, name, version), signature_paths(signed)[0]
        entry.parent.mkdir(parents=True, exist_ok=True)
        entry.write_bytes(entry_path(signed).read_bytes())
        moved = entry.parents[1] / "signatures" / signature.name.replace("00000001", f"{version:08d}")
        moved.parent.mkdir(exist_ok=True)
        moved.write_bytes(signature.read_bytes())
        with pytest.raises(CorruptDataError, match="does not match the stored entry"):
            restore(signed, f"{name}@{version}", trusted_keys=[key.source])


def test_one_of_several_keys_is_enough_and_another_key_is_not(signed, key, tmp_path):
    other = make_key(tmp_path / "other.pem")
    with pytest.raises(CorruptDataError, match=f"{other.id}.*it was not signed"):
        restore(signed, "m", trusted_keys=[other.source])
    both = tmp_path / "both.pem"
    both.write_bytes(other.source.read_bytes() + b"# the other\n" + key.source.read_bytes())
    assert [each.id for each in load_public_keys([both])] == [other.id, key.id]
    restore(signed, "m", trusted_keys=[both])


def test_every_flipped_bit_of_a_signature_is_found(signed, key):
    (path,) = signature_paths(signed)
    whole = path.read_bytes()
    for place in range(0, len(whole), 3):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(CorruptDataError, match="not trusted"):
            restore(signed, "m", trusted_keys=[key.source])


def test_signing_again_changes_nothing_and_no_file_is_overwritten(signed, tmp_path):
    private = load_private_key(tmp_path / "key.pem")
    (path,) = signature_paths(signed)
    before = path.read_bytes()
    assert sign(signed, "m@1", private).location == str(path)
    assert path.read_bytes() == before
    path.write_text("{}")
    with pytest.raises(ConflictError, match="remove that file"):
        sign(signed, "m@1", private)


def test_what_is_signed_is_the_same_for_ever():
    version = Resolved("models", "digits-cnn", 3)
    assert signed_message(version, {"b": [1.5, None], "a": "é"}) == (
        b'datasvc model version 1\0digits-cnn\x003\0{"a":"\\u00e9","b":[1.5,null]}'
    )


def test_a_new_key_is_the_owners_alone_and_never_overwrites(tmp_path):
    path = tmp_path / "key.pem"
    made = make_key(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_private_key(path).public.id == made.id
    before = path.read_bytes(), made.source.read_bytes()
    with pytest.raises(ConfigError, match="never overwritten"):
        make_key(path)
    assert (path.read_bytes(), made.source.read_bytes()) == before
    made.source.unlink()
    with pytest.raises(ConfigError, match="never overwritten"):
        make_key(path)
    assert not made.source.exists()


def test_a_private_key_that_cannot_be_written_leaves_no_public_one_behind(tmp_path):
    # The file system takes a public key's 113 bytes and no private one's 119.
    code = (
        "import resource, sys; from pathlib import Path\n"
        "from datasvc.models.versions.signing import make_key\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (116, 116))\n"
        "make_key(Path(sys.argv[1]))\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "key.pem")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[3], check=False)
    assert "cannot write the key" in done.stderr
    assert list(tmp_path.iterdir()) == []


def pem(key, *, password=None):
    secret = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    return key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, secret)


@pytest.mark.parametrize(
    ("content", "mode", "message"),
    [
        (pem(Ed25519PrivateKey.generate()), 0o644, "chmod 600"),
        (pem(Ed25519PrivateKey.generate()), 0o640, "chmod 600"),
        (pem(Ed25519PrivateKey.generate()), 0o620, "chmod 600"),
        (pem(Ed25519PrivateKey.generate(), password=b"x"), 0o600, "cannot read a private key"),
        (pem(ed448.Ed448PrivateKey.generate()), 0o600, "does not hold an Ed25519 key"),
        (b"no key", 0o600, "cannot read a private key"),
        (None, 0o600, "cannot read a private key"),
    ],
)
def test_a_file_that_is_no_private_key_is_refused(tmp_path, content, mode, message):
    path = tmp_path / "key.pem"
    if content is not None:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(ConfigError, match=message):
        load_private_key(path)


def test_a_file_without_public_keys_or_with_others_is_refused(tmp_path, key):
    other = ed448.Ed448PrivateKey.generate().public_key()
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    path = tmp_path / "keys.pub"
    for content in (b"", key.source.read_bytes() + other.public_bytes(serialization.Encoding.PEM, form)):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match="Ed25519 public keys"):
            trusted_keys([path])


def test_without_cryptography_whoever_wants_signatures_is_told_and_nobody_else():
    code = (
        "import sys; sys.modules['cryptography'] = None\n"
        "import datasvc.models.versions.signing\n"
        "from datasvc.errors import ConfigError\n"
        "from datasvc.models.versions.signing import trusted_keys\n"
        "assert trusted_keys() == ()\n"
        "try: trusted_keys(['x.pub'])\n"
        "except ConfigError as error: print(error)\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    assert "pip install '.[sign]'" in done.stdout
