"""The commands of purges."""

import json
from dataclasses import replace

from datasvc.api.certificates import list_certificates
from datasvc.api.purge import purge
from datasvc.api.recorded_copies import read_copies
from datasvc.errors import NotFoundError
from datasvc.repository import Repository
from datasvc.repository.logs.copies import TRANSFER, RecordedCopy, record_copies
from datasvc.shards import open_dataset
from datasvc.shards.export import export
from tests.cli.command import run
from tests.shards.written_versions import LABELLED_SCHEMA, labelled, write_version


def test_a_certificate_is_shown_only_with_the_name_of_its_data_set(repository):
    for name in ("pets", "birds"):
        write_version(repository, name, {"train": [labelled(a=0, b=1)]}, LABELLED_SCHEMA)
    digest = purge(repository, "pets", keys=["a"], dry_run=False).certificate
    shown = run("certificates", "pets", digest[:8], "--json", "--repo", repository.url)
    assert json.loads(shown.stdout)["keys"] == ["a"]
    refused = run("certificates", "birds", digest[:8], "--repo", repository.url)
    assert refused.returncode == NotFoundError.exit_code
    assert "no certificate of a purge of birds" in refused.stderr


def test_a_purge_says_where_copies_are_and_what_to_do(repository, tmp_path):
    write_version(repository, "pets", {"train": [labelled(a=0, b=1)]}, LABELLED_SCHEMA)
    export(repository, "pets", str(tmp_path / "out"), "parquet")
    record_copies(
        repository.storage, [replace(read_copies(repository)[0], kind=TRANSFER, destination="s3://a:b@c/d")]
    )
    (tmp_path / "keys").write_text("a\n")
    for options in ([], ["--yes"]):
        done = run("purge", "pets", "--keys", str(tmp_path / "keys"), *options, "--repo", repository.url)
        exported, copied = [line for line in done.stdout.splitlines() if "nothing is promised" in line]
        assert exported.startswith(f"  pets@1 was exported to {tmp_path / 'out'} on 20")
        assert exported.endswith("with 1 of the samples; nothing is promised there: delete it")
        assert copied.startswith("  pets@1 was copied to s3://c/d on 20")
        assert copied.endswith("nothing is promised there: purge there too")
    (digest,) = [each["certificate"] for each in list_certificates(repository, "pets")]
    shown = json.loads(run("certificates", "pets", digest, "--json", "--repo", repository.url).stdout)
    assert [each["destination"] for each in shown["destinations"]] == [str(tmp_path / "out"), "s3://c/d"]
    (listed,) = json.loads(run("copies", "pets", "--json", "--repo", repository.url).stdout)[1:]
    assert (listed["kind"], listed["samples"]) == ("transfer", 2)
    assert "s3://c/d" in run("copies", "--repo", repository.url).stdout
    assert "s3://c/d" not in run("copies", "birds", "--repo", repository.url).stdout


def test_many_copies_are_counted(repository, tmp_path):
    write_version(repository, "pets", {"train": [labelled(a=0)]}, LABELLED_SCHEMA)
    (tmp_path / "keys").write_text("a\n")
    copy = RecordedCopy("pets@1", TRANSFER, "", 1, {"train": open_dataset(repository, "pets")["train"].digest}, 0)
    for number in range(12):
        record_copies(repository.storage, [replace(copy, destination=f"s3://bucket/{number}")])
    done = run("purge", "pets", "--keys", str(tmp_path / "keys"), "--repo", repository.url)
    assert done.stdout.count("nothing is promised") == 10
    assert "  and 2 more copies, see --json" in done.stdout


def test_a_pull_from_a_repository_that_one_may_only_read_is_made_and_says_what_is_not_recorded(repository, tmp_path):
    write_version(repository, "pets", {"train": [labelled(a=0, b=1)]}, LABELLED_SCHEMA)
    Repository.create(str(tmp_path / "own"))
    # A file where the folder of the log would be: root may write into every folder.
    (tmp_path / "repo" / "copies").write_text("")
    done = run("pull", "pets", "--from", repository.url, "--repo", tmp_path / "own")
    assert done.returncode == 0
    assert [line for line in done.stderr.splitlines() if "not recorded" in line]
    assert open_dataset(Repository.open(str(tmp_path / "own")), "pets")["train"][0]["key"] == "a"
