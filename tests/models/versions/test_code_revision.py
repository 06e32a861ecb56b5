"""Which code ran: revision, what differs from it as a patch that applies, what git does not know, no credentials."""

import subprocess

import pytest

from datasvc.models import CheckpointManager, CodeRevision, describe_code, describe_model
from datasvc.models.versions import code_revision as code_module
from datasvc.models.versions.code_revision import keep_code, without_credentials


def git(folder, *arguments):
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "protocol.file.allow=always"]
    command = ["git", "-C", folder, *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def make_checkout(folder, files):
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)
    git(folder, "init"), git(folder, "add", "."), git(folder, "commit", "-m", "x")
    return folder


def test_what_differs_from_the_revision_is_kept_as_a_patch_that_makes_it_again(repository, tmp_path):
    checkout = make_checkout(tmp_path / "a", {"train.py": b"1\n", "weights": b"\0\1\2", "gone.py": b"x\n"})
    (checkout / "train.py").write_bytes(b"2\n")
    (checkout / "weights").write_bytes(b"\0\1\3")
    (checkout / "gone.py").unlink()
    (checkout / "notes é").write_text("unknown to git")
    (checkout / "runs").mkdir()
    (checkout / "runs" / "log").write_text("")
    kept = keep_code(repository.objects, checkout)
    assert (kept.revision, kept.dirty, kept.diff_kind) == (git(checkout, "rev-parse", "HEAD"), True, "patch")
    assert (kept.untracked, kept.num_untracked) == (("notes é", "runs/"), 2)
    git(tmp_path, "clone", checkout, "b")
    (tmp_path / "patch").write_bytes(repository.objects.read(kept.diff))
    git(tmp_path / "b", "apply", tmp_path / "patch")
    assert (tmp_path / "b" / "train.py").read_bytes() == b"2\n"
    assert (tmp_path / "b" / "weights").read_bytes() == b"\0\1\3"
    assert not (tmp_path / "b" / "gone.py").exists()
    assert CodeRevision.from_dict({**kept.to_dict(), "later": 1}) == kept
    assert kept.diff in str(kept)
    (checkout / "train.py").write_bytes(b"3\n")
    assert keep_code(repository.objects, checkout) == kept  # the process runs what it loaded


def test_all_untracked_files_are_counted_and_the_first_are_named(tmp_path):
    checkout = make_checkout(tmp_path / "a", {"train.py": b"1\n", "?? old": b"2\n", "third": b"3\n"})
    git(checkout, "mv", "?? old", "new")
    names = [f"{number:04d}-{'x' * 200}" for number in range(700)]  # twice the output that is read at once
    for name in names:
        (checkout / name).write_bytes(b"")
    described = describe_code(checkout)
    assert (described.num_untracked, described.untracked) == (700, tuple(names[:100]))
    assert described.dirty


def test_a_run_says_which_code_lay_there_when_it_opened_its_model(repository, tmp_path, monkeypatch):
    checkout = make_checkout(tmp_path / "a", {"train.py": b"1\n"})
    monkeypatch.chdir(checkout)
    with CheckpointManager(repository, "cnn") as model:
        (checkout / "train.py").write_bytes(b"2\n")
        model.save({}, step=1, wait=True)
    code = describe_model(repository, "cnn").entry["code"]
    assert (code["revision"], code["dirty"]) == (git(checkout, "rev-parse", "HEAD"), False)


def test_of_a_patch_that_is_too_long_the_files_are_named(repository, tmp_path, monkeypatch):
    checkout = make_checkout(tmp_path / "a", {"train.py": b"1\n"})
    (checkout / "train.py").write_bytes(b"2\n" * 500)
    monkeypatch.setattr(code_module, "MAX_DIFF_BYTES", 300)
    kept = keep_code(repository.objects, checkout)
    assert kept.diff_kind == "stat"
    assert b"train.py | 501" in repository.objects.read(kept.diff)


def test_a_clean_checkout_keeps_nothing_and_says_where_it_is_from(repository, tmp_path):
    origin = make_checkout(tmp_path / "origin", {"lib.py": b"1\n"})
    checkout = make_checkout(tmp_path / "a", {"train.py": b"1\n"})
    git(checkout, "submodule", "add", origin, "vendored lib"), git(checkout, "commit", "-m", "y")
    git(checkout, "remote", "add", "origin", "https://me:secret@example.com/team/project.git?token=1")
    kept = keep_code(repository.objects, checkout)
    assert kept == describe_code(checkout)
    assert (kept.dirty, kept.diff, kept.remote) == (False, None, "https://example.com/team/project.git")
    assert kept.submodules == {"vendored lib": git(origin, "rev-parse", "HEAD")}
    assert "secret" not in str(kept.to_dict())


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("https://token@example.com/a.git", "https://example.com/a.git"),
        ("ssh://git@example.com:22/a.git", "ssh://git@example.com:22/a.git"),
        ("ssh://me:secret@example.com/a", "ssh://example.com/a"),
        ("git@example.com:team/a.git", "git@example.com:team/a.git"),
        ("me:secret@example.com:team/a.git", "example.com:team/a.git"),
        ("/srv/a.git", "/srv/a.git"),
        ("/srv/a@b.git", "/srv/a@b.git"),
        ("codecommit::https://me:secret@example.com/a", "codecommit::https://example.com/a"),
        ("a::b::https://me:secret@example.com/a", "a::b::https://example.com/a"),
        ("https://me:sec/ret@example.com/a", "https://example.com/a"),
        ("https://me:sec#ret@example.com/a#x", "https://example.com/a"),
        ("https://me:s@cret@example.com/a?t=1", "https://example.com/a"),
        ("https://example.com/a?token=sec@ret", None),
        ("ext::ssh -i key me:secret@example.com %S a", None),
    ],
)
def test_a_remote_is_named_without_credentials(url, said):
    assert without_credentials(url) == said
