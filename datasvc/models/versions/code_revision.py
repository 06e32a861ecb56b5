"""Which code a run executes: the git revision around its working folder, and what differs from it."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from datasvc.errors import CorruptDataError
from datasvc.repository import Objects

MAX_DIFF_BYTES: Final = 4 << 20
_MAX_NAMES: Final = 100
_MAX_NAME_BYTES: Final = 64 << 10
# A file system that does not answer must not hold up a save for long.
_TIMEOUT_S: Final = 60
# Of several places a patch must say the same, whatever their users set up; and no lock may disturb another git.
# git hands such a URL to a program of its own: codecommit::https://...
_HELPER: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9+.-]*::)(.*)", re.DOTALL)
_PLAIN: Final = ("-c", "core.quotePath=false", "-c", "diff.noprefix=false", "-c", "diff.mnemonicPrefix=false")
_DIFF: Final = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--submodule=short")


@dataclass(frozen=True)
class CodeRevision:
    """The code of a run.

    Attributes:
        revision: git commit, None outside a git checkout.
        dirty: whether tracked files differed from that commit.
        remote: where the checkout was cloned from, without credentials; None: nowhere, or not asked.
        diff: digest of the object with what differed; None where nothing did, or nobody kept it.
        diff_kind: "patch", which `git apply` takes; or "stat" where a patch is longer than MAX_DIFF_BYTES.
        untracked: files and folders that git did not know, the first hundred.
        num_untracked: how many there were.
        submodules: by path the commit that was checked out, with "+" before one that is not the recorded one.
    """

    revision: str | None
    dirty: bool
    remote: str | None = None
    diff: str | None = None
    diff_kind: str | None = None
    untracked: Sequence[str] = ()
    num_untracked: int = 0
    submodules: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.revision is None:
            return "not in a git checkout"
        changes = f"with local changes{f', kept in {self.diff}' if self.diff else ''}" if self.dirty else ""
        unknown = f"{self.num_untracked} untracked" if self.num_untracked else ""
        said = ", ".join(each for each in (changes, unknown) if each)
        return self.revision + (f" ({said})" if said else "")

    def to_dict(self) -> dict[str, Any]:
        """Return the revision as JSON values, without what there is none of."""
        told = {name: value for name, value in vars(self).items() if value}
        told |= {"untracked": list(self.untracked)} if self.untracked else {}
        return {**told, "revision": self.revision, "dirty": self.dirty}

    @classmethod
    def from_dict(cls, code: Mapping[str, Any]) -> CodeRevision:
        """Return what `to_dict` gave; fields of a later release are left out. Raises CorruptDataError."""
        try:
            known = {name: code[name] for name in cls.__dataclass_fields__ if name in code}
            return cls(**{**known, "untracked": tuple(code.get("untracked", ()))})
        except (TypeError, AttributeError) as error:
            raise CorruptDataError(f"this does not say which code ran: {error}; found {code!r}") from error


def describe_code(folder: Path | None = None) -> CodeRevision:
    """Return the git revision of the checkout around `folder`, the working folder by default; nothing is kept."""
    where = str(folder or Path.cwd())
    revision = _git(where, "rev-parse", "--verify", "HEAD")
    if revision is None:
        return CodeRevision(None, dirty=False)
    status = (_git(where, "status", "--porcelain=v1", "-z", most=_MAX_NAME_BYTES) or "").split("\0")[:-1]
    untracked = [each[3:] for each in status if each.startswith("?? ")]
    return CodeRevision(
        revision,
        dirty=_is_dirty(where),
        remote=_remote(where),
        untracked=tuple(untracked[:_MAX_NAMES]),
        num_untracked=len(untracked),
        submodules=_submodules(where),
    )


def capture_code(folder: Path | None = None) -> None:
    """Read now what `keep_code` will store: a run calls this when it begins, however late it saves first."""
    _capture(str(folder or Path.cwd()))


def keep_code(objects: Objects, folder: Path | None = None) -> CodeRevision:
    """Return the revision of a checkout, what differs from it stored as an object.

    It is read once per process and folder, by `capture_code` or here: a run executes what it loaded when it began,
    whatever is edited later.

    Args:
        objects: where the diff goes.
        folder: in the checkout; default the working folder.

    Raises:
        UnavailableError: the diff cannot be stored.
    """
    code, diff = _capture(str(folder or Path.cwd()))
    return replace(code, diff=objects.put(diff).digest) if diff else code


@lru_cache(maxsize=8)
def _capture(folder: str) -> tuple[CodeRevision, bytes]:
    code = describe_code(Path(folder))
    if not code.dirty:
        return code, b""
    patch = _output(folder, *_DIFF, "--binary", "HEAD", most=MAX_DIFF_BYTES + 1)
    if patch is not None and len(patch) <= MAX_DIFF_BYTES:
        return replace(code, diff_kind="patch"), patch
    stat = _output(folder, *_DIFF, "--stat=200", "HEAD", most=MAX_DIFF_BYTES) or b""
    return replace(code, diff_kind="stat"), stat


def _is_dirty(folder: str) -> bool:
    # Submodules that lie at another commit are local changes; files in them that git does not know are none.
    return bool(
        _git(folder, "status", "--porcelain", "--untracked-files=no", "--ignore-submodules=untracked", most=1)
    )


def _remote(folder: str) -> str | None:
    """Return the URL of the remote that HEAD follows, else of origin, without credentials."""
    remotes = (_git(folder, "remote") or "").split()
    if not remotes:
        return None
    name = "origin" if "origin" in remotes else remotes[0]
    url = _git(folder, "remote", "get-url", name)
    return None if url is None else without_credentials(url)


def without_credentials(url: str) -> str | None:
    """Return the URL of a git remote without user, password and query; None where it may hold a secret all the same.

    The user `git` is no secret and stays. A password may hold what else ends a host, so a path with an @ is cut too.
    """
    peeled = _HELPER.fullmatch(url)
    if peeled:
        helper, inner = peeled.groups()
        bare = without_credentials(inner) if "://" in inner else None
        return None if bare is None else f"{helper}{bare}"
    scheme, is_url, rest = url.partition("://")
    if not is_url:
        user, _, place = url.rpartition("@")
        return url if user in {"", "git"} or url.startswith(("/", ".")) else place
    user, _, place = rest.rpartition("@")
    if "?" in user:
        return None  # what follows may be the end of a token
    kept = "git@" if user == "git" and scheme == "ssh" else ""
    return f"{scheme}://{kept}{re.split('[?#]', place)[0]}"


def _submodules(folder: str) -> dict[str, str]:
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None or not Path(top, ".gitmodules").is_file():
        return {}
    lines = (_output(top, "submodule", "status", most=_MAX_NAME_BYTES) or b"").decode(errors="replace").splitlines()
    found = {}
    for line in lines[:_MAX_NAMES]:
        mark, (commit, _, rest) = line[:1], line[1:].partition(" ")
        path = rest.rpartition(" (")[0] if rest.endswith(")") else rest
        found[path] = f"{mark.strip()}{commit}"
    return found


def _git(folder: str, *arguments: str, most: int = 1 << 20) -> str | None:
    output = _output(folder, *arguments, most=most)
    return None if output is None else output.decode(errors="replace").strip("\n")


def _output(folder: str, *arguments: str, most: int) -> bytes | None:
    """Return the first `most` bytes that git prints; None where it fails, takes too long, or is not installed."""
    command = ["git", "-C", folder, *_PLAIN, *arguments]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        with subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        ) as git:
            watch = threading.Timer(_TIMEOUT_S, git.kill)
            watch.daemon = True
            watch.start()
            try:
                return _read(git, most)
            finally:
                watch.cancel()
    except OSError:
        return None


def _read(git: subprocess.Popen[bytes], most: int) -> bytes | None:
    assert git.stdout is not None
    output = git.stdout.read(most)
    if git.stdout.read(1):
        git.kill()  # the rest is not wanted, however long it is
        return output
    return output if git.wait() == 0 else None
