"""Which URLs obstore takes, with which settings, and why the others are left to fsspec."""

import importlib.util
import json
import sys
from datetime import UTC, datetime, timedelta

import pytest
from fsspec.config import conf

from datasvc.errors import ConfigError
from datasvc.repository import Storage
from datasvc.repository.store import object_stores
from datasvc.repository.store.object_stores import ObjectBucket, choose_bucket, make_client_options
from tests.repository.regional_server import RegionalServer

KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
S3 = {**KEYS, "AWS_REGION": "eu-central-1"}
AZURE = {"AZURE_STORAGE_ACCOUNT_NAME": "account", "AZURE_STORAGE_ACCOUNT_KEY": "a2V5"}


@pytest.fixture(autouse=True)
def without_settings(monkeypatch, tmp_path):
    """No settings of this machine or of another test."""
    for scheme in object_stores.SCHEMES:
        monkeypatch.setitem(conf, scheme, {})
    for name in ("AWS_PROFILE", "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL", *KEYS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    return tmp_path


def test_a_bucket_is_taken_with_the_keys_of_the_environment():
    assert choose_bucket("s3://bucket/a/b/", S3) == ObjectBucket("s3", "bucket", "a/b", {"region": "eu-central-1"})
    assert choose_bucket("s3a://bucket", S3) == ObjectBucket("s3", "bucket", "", {"region": "eu-central-1"})


def test_an_endpoint_needs_no_region():
    endpoint = {"AWS_ENDPOINT_URL": "http://host:9000/"}
    bucket = choose_bucket("s3://bucket", {**KEYS, **endpoint})
    assert bucket.config == {"region": "us-east-1", "endpoint": "http://host:9000"}
    assert bucket.allows_http
    assert not choose_bucket("s3://bucket", S3).allows_http


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("https://host/a", "does not read this kind of URL"),
        ("hf://datasets/a/b", "does not read this kind of URL"),
        ("/a/s3", "does not read this kind of URL"),
        ("simplecache::s3://bucket/a", "does not read this kind of URL"),
        ("s3://key:secret@bucket/a", "credentials or options"),
        ("s3://bucket/a?versionId=1", "credentials or options"),
        ("s3://bucket/a//b", "empty names"),
        ("s3://bucket/a/./b", "empty names"),
        ("abfs://container@host.example/a", "the address of a server"),
    ],
)
def test_other_urls_are_left_to_fsspec_with_a_reason(url, reason):
    assert reason in choose_bucket(url, {**S3, **AZURE})


def test_a_scheme_that_fsspec_is_configured_for_is_left_to_it(monkeypatch):
    monkeypatch.setitem(conf, "s3", {"anon": True})
    assert choose_bucket("s3a://bucket", S3) == "fsspec is configured for s3a://"
    assert isinstance(choose_bucket("az://container", AZURE), ObjectBucket)


def test_a_user_can_ask_for_fsspec():
    assert choose_bucket("s3://bucket", {**S3, "DATASVC_STORE_CLIENT": "fsspec"}) == (
        "DATASVC_STORE_CLIENT is set to fsspec"
    )


def write_profile(folder, **settings):
    lines = "".join(f"{name} = {value}\n" for name, value in settings.items())
    (folder / "config").write_text(f"[profile work]\n{lines}")
    (folder / "credentials").write_text("[work]\naws_access_key_id = A\naws_secret_access_key = B\n")


def test_the_keys_the_region_and_the_endpoint_of_a_profile_are_those_of_botocore(without_settings, monkeypatch):
    write_profile(without_settings, region="eu-west-1", endpoint_url="https://host")
    monkeypatch.setenv("AWS_PROFILE", "work")
    bucket = choose_bucket("s3://bucket", {**S3, "AWS_PROFILE": "work", "AWS_REGION": ""})
    assert bucket.config == {"region": "eu-west-1", "endpoint": "https://host"}
    provide = object_stores._BotocoreCredentials(bucket.credentials)
    credentials = provide()
    assert (credentials["access_key_id"], credentials["secret_access_key"]) == ("A", "B")
    assert credentials["expires_at"] > datetime.now(UTC)


def test_each_request_is_signed_with_the_credentials_that_are_then_valid(without_settings, monkeypatch):
    """A role's keys last an hour, and a job for days: a store that kept its first keys would lose access.

    botocore renews these keys at every use, since they expire soon.
    """
    monkeypatch.setattr(object_stores, "_CREDENTIALS_LAST", timedelta(0))  # obstore asks again without a pause
    program, number = without_settings / "program.py", without_settings / "number"
    number.write_text("0")
    program.write_text(
        "import datetime, json, pathlib\n"
        f"file = pathlib.Path({str(number)!r})\n"
        "file.write_text(str(int(file.read_text()) + 1))\n"
        "expires = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=30)\n"
        "key = {'AccessKeyId': 'key' + file.read_text(), 'SecretAccessKey': 'secret'}\n"
        "print(json.dumps({'Version': 1, 'Expiration': expires.isoformat(), **key}))\n"
    )
    with RegionalServer("http://unused", "another", answer=(404, b"")) as server:
        write_profile(without_settings, region="us-east-1", endpoint_url=server.url)
        with (without_settings / "config").open("a") as config:
            config.write(f"credential_process = {sys.executable} {program}\n")
        (without_settings / "credentials").unlink()
        monkeypatch.setenv("AWS_PROFILE", "work")
        storage = Storage("s3://bucket/a")
        assert storage.client == "obstore"
        for _ in range(3):
            assert storage.size("file") is None
    assert server.keys == ["key2", "key3", "key4"]  # the first was given out before a request


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "neither AWS_REGION nor an endpoint is set"),
        ({"s3": "\n  addressing_style = virtual"}, "settings for S3"),
    ],
)
def test_a_profile_that_obstore_does_not_understand_is_left_to_s3fs(settings, reason, without_settings, monkeypatch):
    write_profile(without_settings, **settings)
    monkeypatch.setenv("AWS_PROFILE", "work")
    assert reason in choose_bucket("s3://bucket", {"AWS_PROFILE": "work"})


def test_a_profile_that_cannot_be_read_is_a_matter_of_settings(monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(ConfigError, match=r"AWS profile: .*nobody.*check AWS_PROFILE"):
        choose_bucket("s3://bucket", {"AWS_PROFILE": "nobody"})


def test_no_credentials_are_left_to_s3fs():
    assert choose_bucket("s3://bucket", {"AWS_REGION": "eu-west-1"}) == "there are no AWS credentials"


def test_without_s3fs_the_error_names_what_to_install_or_to_set(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "botocore" else find(name))
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(ConfigError, match=r"pip install .*s3fs.*obstore needs none, but .* not in the environment"):
        Storage("s3://bucket/repo")


@pytest.mark.parametrize(
    "url", ["abfs://container/a", "az://container/a", "abfs://container@account.dfs.core.windows.net/a"]
)
def test_a_container_is_taken_with_the_key_of_the_environment(url):
    bucket = choose_bucket(url, AZURE)
    assert (bucket.kind, bucket.name, bucket.prefix) == ("azure", "container", "a")


def test_a_connection_string_gives_account_key_and_endpoint():
    text = "DefaultEndpointsProtocol=https;AccountName=me;AccountKey=a2V5PT0=;EndpointSuffix=core.windows.net"
    bucket = choose_bucket("abfs://container", {"AZURE_STORAGE_CONNECTION_STRING": text})
    assert bucket.config == {
        "account_name": "me", "account_key": "a2V5PT0=", "endpoint": "https://me.blob.core.windows.net"
    }  # fmt: skip
    assert "a2V5" not in repr(bucket)
    other = "abfs://container@other.blob.core.windows.net"
    assert "another account" in choose_bucket(other, {"AZURE_STORAGE_CONNECTION_STRING": text})


@pytest.mark.parametrize(
    ("environ", "reason"),
    [({}, "no account of Azure"), ({"AZURE_STORAGE_ACCOUNT_NAME": "account"}, "no key, token or application")],
)
def test_other_credentials_of_azure_are_left_to_adlfs(environ, reason):
    assert reason in choose_bucket("abfs://container", environ)


@pytest.mark.parametrize("kind", ["service_account", "authorized_user", "external_account", None])
def test_credentials_of_google_are_those_of_a_file_of_a_known_type(kind, tmp_path):
    path = tmp_path / "credentials.json"
    path.write_text("not JSON" if kind is None else json.dumps({"type": kind}))
    found = choose_bucket("gs://bucket/a", {"GOOGLE_APPLICATION_CREDENTIALS": str(path)})
    if kind in {"service_account", "authorized_user"}:
        assert (found.kind, found.name, found.prefix, list(found.config.values())) == (
            "google", "bucket", "a", [str(path)]
        )  # fmt: skip
    else:
        assert str(path) in found


def test_an_emulator_of_google_is_left_to_gcsfs():
    assert "emulator" in choose_bucket("gs://bucket", {"STORAGE_EMULATOR_HOST": "http://host"})


def test_the_certificates_that_aws_programs_trust_are_trusted(tmp_path, monkeypatch):
    (tmp_path / "bundle.pem").write_bytes(b"certificates")
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "bundle.pem"))
    options = make_client_options(connect_s=1, silence_s=1, allow_http=False)
    assert options["root_certificate"] == b"certificates"
    monkeypatch.setenv("AWS_CA_BUNDLE", str(tmp_path / "missing.pem"))
    with pytest.raises(ConfigError, match=r"AWS_CA_BUNDLE .*missing\.pem"):
        make_client_options(connect_s=1, silence_s=1, allow_http=False)
