"""Describes code and environment of a run, for the entry of its versions: git revision, changes, packages.

A `CheckpointManager` calls `capture_code` when it starts, and `commit` calls `keep_code` for each version. Git runs
with limits of time and output. A run without git, or outside of a checkout, has no revision.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

from datasvc.errors import CorruptDataError
from datasvc.repository import Objects

MAX_DIFF_BYTES: Final = 4 << 20
# Listing the versions reads all their entries, so an entry records only some names of files and submodules.
_MAX_NAMES: Final = 100
_MAX_NAME_BYTES: Final = 64 << 10  # maximum size of git's output with names, and of one read of it
# A file system that does not answer must not delay a save for long.
_TIMEOUT_S: Final = 60
# A remote helper: git passes a URL such as codecommit::https://... to a separate program.
_HELPER: Final = re.compile(r"([A-Za-z0-9][A-Za-z0-9+.-]*::)(.*)", re.DOTALL)
# Override user settings, so that a patch has the same form everywhere.
_PLAIN: Final = ("-c", "core.quotePath=false", "-c", "diff.noprefix=false", "-c", "diff.mnemonicPrefix=false")
_DIFF: Final = ("diff", "--no-ext-diff", "--no-textconv", "--no-color", "--submodule=short")
# The same patch from every clone and configuration.
_ALIKE: Final = (
    "--binary", "--full-index", "--no-renames", "--unified=3", "--inter-hunk-context=0", "--diff-algorithm=myers",
)  # fmt: skip


PACKAGES: Final = (
    "datasvc", "torch", "numpy", "pyarrow", "zstandard", "blake3", "fsspec", "s3fs", "pillow", "nvidia-dali-cuda120",
    "nvidia-dali-cuda130", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "torchvision", "triton", "flash-attn",
    "safetensors", "tokenizers", "transformers", "accelerate", "lightning", "pytorch-lightning", "deepspeed",
)  # fmt: skip
"""Packages whose versions are recorded if they are installed."""
_PROC: Final = Path("/proc/driver/nvidia")  # files of NVIDIA's driver for Linux


@dataclass(frozen=True)
class CodeRevision:
    """The code of a run.

    Attributes:
        revision: git commit; None outside of a git checkout.
        dirty: whether tracked files differed from that commit.
        remote: URL of the remote repository, without credentials; None: no remote, or not recorded.
        diff: digest of the object with the local changes; None: no changes, or not stored.
        diff_kind: "patch", in the form for `git apply`; or "stat" if the patch is larger than MAX_DIFF_BYTES.
        untracked: untracked files and folders, at most 100.
        num_untracked: number of all untracked files and folders.
        submodules: checked-out commit of each submodule, by path; begins with "+" if `revision` names another commit.
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
        kept = f", kept in {self.diff}" if self.diff else ""
        changes = f"with local changes{kept}" if self.dirty else ""
        untracked = f"{self.num_untracked} untracked" if self.num_untracked else ""
        details = ", ".join(text for text in (changes, untracked) if text)
        return self.revision + (f" ({details})" if details else "")

    def to_dict(self) -> dict[str, Any]:
        """Return the revision as JSON values; empty fields are left out."""
        fields = {name: value for name, value in vars(self).items() if value}
        fields |= {"untracked": list(self.untracked)} if self.untracked else {}
        return {**fields, "revision": self.revision, "dirty": self.dirty}

    @classmethod
    def from_dict(cls, code: Mapping[str, Any]) -> CodeRevision:
        """Return the revision of a `to_dict` result; unknown fields are ignored.

        Raises CorruptDataError: `code` has another form.
        """
        try:
            fields = {name: code[name] for name in cls.__dataclass_fields__ if name in code}
            return cls(**{**fields, "untracked": tuple(code.get("untracked", ()))})
        except (TypeError, AttributeError) as error:
            raise CorruptDataError(f"not a valid code revision: {error}; found {code!r}") from error


def describe_code(folder: Path | None = None) -> CodeRevision:
    """Return the code of the checkout that contains `folder`, by default the working folder. Stores nothing."""
    checkout = str(folder or Path.cwd())
    revision = _git(checkout, "rev-parse", "--verify", "HEAD")
    if revision is None:
        return CodeRevision(None, dirty=False)
    untracked, num_untracked = _untracked(checkout)
    # A submodule at another commit is a local change; untracked files in a submodule are not.
    tracked_only = ("--untracked-files=no", "--ignore-submodules=untracked")
    return CodeRevision(
        revision,
        # Any output means a change, so one byte of it is enough.
        dirty=bool(_git(checkout, "status", "--porcelain", *tracked_only, max_bytes=1)),
        remote=_remote(checkout),
        untracked=untracked,
        num_untracked=num_untracked,
        submodules=_submodules(checkout),
    )


def capture_code(folder: Path | None = None) -> CodeRevision:
    """Read the code now for a later `keep_code`; a run calls this at its start, before files are edited."""
    return _capture(str(folder or Path.cwd()))[0]


def identify_code(folder: Path | None = None) -> str | None:
    """Return a text that tells the code of two processes apart: the commit, and a digest of the local changes.

    It is read once, as by `capture_code`, without untracked files. None: git does not tell, or not in a checkout.
    """
    return _identify(str(folder or Path.cwd()))


@lru_cache(maxsize=8)
def _identify(folder: str) -> str | None:
    revision = _git(folder, "rev-parse", "--verify", "HEAD")
    changes = revision and _output(folder, *_DIFF, *_ALIKE, "HEAD", max_bytes=MAX_DIFF_BYTES)
    if revision is None or changes is None:
        return None
    return f"{revision} with local changes {hashlib.sha256(changes).hexdigest()[:12]}" if changes else revision


def keep_code(objects: Objects, folder: Path | None = None) -> CodeRevision:
    """Return the revision of a checkout and store its local changes as an object.

    The code is read once per process and folder, by `capture_code` or here: a process executes the code that it
    loaded at its start, whatever is edited later. `folder` is in the checkout; default: the working folder.
    Raises UnavailableError: the store failed.
    """
    code, diff = _capture(str(folder or Path.cwd()))
    return replace(code, diff=objects.put(diff).digest) if diff else code


@lru_cache(maxsize=8)
def _capture(folder: str) -> tuple[CodeRevision, bytes]:
    """Return the code and its local changes: a patch, or a summary if the patch is too large; b"" for no changes."""
    code = describe_code(Path(folder))
    if not code.dirty:
        return code, b""
    # Read one byte more than the limit: it shows that the patch is larger.
    patch = _output(folder, *_DIFF, "--binary", "HEAD", max_bytes=MAX_DIFF_BYTES + 1)
    if patch is not None and len(patch) <= MAX_DIFF_BYTES:
        return replace(code, diff_kind="patch"), patch
    stat = _output(folder, *_DIFF, "--stat=200", "HEAD", max_bytes=MAX_DIFF_BYTES) or b""
    return replace(code, diff_kind="stat"), stat


def _remote(folder: str) -> str | None:
    """Return the URL of the remote `origin`, or else of the first remote, without credentials."""
    remotes = (_git(folder, "remote") or "").split()
    if not remotes:
        return None
    name = "origin" if "origin" in remotes else remotes[0]
    url = _git(folder, "remote", "get-url", name)
    return None if url is None else without_credentials(url)


def without_credentials(url: str) -> str | None:
    """Return the URL of a git remote without user, password and query; None if it may still contain a secret.

    The user `git` is not a secret and is kept. A password may contain characters that end a host name, so everything
    up to the last @ is removed, even in a path.
    """
    with_helper = _HELPER.fullmatch(url)
    if with_helper:
        helper, inner = with_helper.groups()
        bare = without_credentials(inner) if "://" in inner else None
        return None if bare is None else f"{helper}{bare}"
    scheme, is_url, remainder = url.partition("://")
    if not is_url:
        # The form `user@host:path` of scp, or a path.
        user, _, host_path = url.rpartition("@")
        return url if user in {"", "git"} or url.startswith(("/", ".")) else host_path
    user, _, host_path = remainder.rpartition("@")
    if "?" in user:
        # This @ is in the query, so the text after it may be the end of a token.
        return None
    kept = "git@" if user == "git" and scheme == "ssh" else ""
    return f"{scheme}://{kept}{re.split('[?#]', host_path)[0]}"


def _untracked(folder: str) -> tuple[tuple[str, ...], int]:
    """Return the first names, and the number of all untracked files and folders; (), 0 if git fails."""
    names: list[str] = []
    num_untracked = 0
    try:
        with _running(folder, "status", "--porcelain=v1", "-z") as git:
            assert git.stdout is not None
            remainder, is_old_name = b"", False
            # Read to the end, but block by block: there may be millions of untracked files.
            while block := git.stdout.read(_MAX_NAME_BYTES):
                *records, remainder = (remainder + block).split(b"\0")
                for record in records:
                    # A record is a state of two letters, a space and a name. After a renamed (R) or copied (C) file,
                    # the next record is only its old name. The state of an untracked file is "??".
                    has_old_name = not is_old_name and (record[:1] in {b"R", b"C"} or record[1:2] in {b"R", b"C"})
                    if not is_old_name and record.startswith(b"?? "):
                        num_untracked += 1
                        if len(names) < _MAX_NAMES:
                            names.append(record[3:].decode(errors="replace"))
                    is_old_name = has_old_name
            return (tuple(names), num_untracked) if git.wait() == 0 else ((), 0)
    except OSError:
        return (), 0


def _submodules(folder: str) -> dict[str, str]:
    """Return the checked-out commit of each submodule by path; see `CodeRevision.submodules`."""
    top = _git(folder, "rev-parse", "--show-toplevel")
    if top is None or not Path(top, ".gitmodules").is_file():
        return {}
    status = _output(top, "submodule", "status", max_bytes=_MAX_NAME_BYTES) or b""
    submodules = {}
    for line in status.decode(errors="replace").splitlines()[:_MAX_NAMES]:
        # A line is a state (a space, or "+" for another commit), the commit, the path and often "(description)".
        state, (commit, _, remainder) = line[:1], line[1:].partition(" ")
        path = remainder.rpartition(" (")[0] if remainder.endswith(")") else remainder
        submodules[path] = f"{state.strip()}{commit}"
    return submodules


def _git(folder: str, *arguments: str, max_bytes: int = 1 << 20) -> str | None:
    """Return git's output as text, without line ends at its start and end; None: see `_output`."""
    output = _output(folder, *arguments, max_bytes=max_bytes)
    return None if output is None else output.decode(errors="replace").strip("\n")


def _output(folder: str, *arguments: str, max_bytes: int) -> bytes | None:
    """Return the first bytes of git's output, up to `max_bytes`; None if git fails, times out or is not installed."""
    try:
        with _running(folder, *arguments) as git:
            assert git.stdout is not None
            output = git.stdout.read(max_bytes)
            if git.stdout.read(1):
                # The rest of the output is not needed, and git would wait until it is read.
                git.kill()
                return output
            return output if git.wait() == 0 else None
    except OSError:
        return None


@contextmanager
def _running(folder: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run git with its output as a pipe; it is killed after `_TIMEOUT_S`. Raises OSError: it is not installed."""
    command = ["git", "-C", folder, *_PLAIN, *arguments]
    # With these variables, git takes no lock that another git process may need, does not prompt, and writes English.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    with subprocess.Popen(  # noqa: S603
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment,
    ) as git:
        timer = threading.Timer(_TIMEOUT_S, git.kill)
        timer.daemon = True
        timer.start()
        try:
            yield git
        finally:
            timer.cancel()


# CUDA is not started on a GPU that the program does not use. The host name is left out unless it is requested.


def describe_environment(*, world_size: int | None = None, hostname: bool = False) -> dict[str, Any]:
    """Return the environment of this process as JSON values; values that are not available are left out.

    Args:
        world_size: number of processes of the job; None: that of torch.distributed, if it is initialized.
        hostname: whether to include the host name.

    Returns:
        `python`, `platform`, `cpus` (number of processors that this process may use), `packages` (version by name),
        `gpus` (number of GPUs by model), `driver` (version of NVIDIA's driver), `cuda`, `cudnn`, `world_size`,
        `hostname`.
    """
    environment: dict[str, Any] = {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        # Copy, because the caller may change the result, but must not change the cached dict.
        "packages": dict(_describe_packages()),
        **_describe_gpus(),
    }
    size = _world_size() if world_size is None else world_size
    if size is not None:
        environment["world_size"] = size
    if hostname:
        environment["hostname"] = socket.gethostname()
    return environment


@lru_cache(maxsize=1)
def _describe_packages() -> dict[str, str]:
    versions = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def _describe_gpus() -> dict[str, Any]:
    """Return the fields `driver`, `cuda`, `cudnn` and `gpus` that are available.

    If this process has started CUDA, `gpus` has the GPUs that it sees; otherwise all GPUs of the node.
    """
    gpu_fields: dict[str, Any] = {}
    driver = _driver()
    if driver is not None:
        gpu_fields["driver"] = driver
    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.version.cuda is not None:
        gpu_fields["cuda"] = torch.version.cuda
        # Querying a GPU that the program does not use would create a context on it, of some hundred megabytes.
        if torch.cuda.is_initialized():
            gpu_fields["cudnn"] = torch.backends.cudnn.version()
            gpu_fields["gpus"] = dict(Counter(map(torch.cuda.get_device_name, range(torch.cuda.device_count()))))
            return gpu_fields
    gpus = _driver_gpus()
    return gpu_fields | ({"gpus": gpus} if gpus else {})


def _driver() -> str | None:
    """Return the version of NVIDIA's driver; None if there is no driver."""
    with suppress(OSError):
        match = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", (_PROC / "version").read_text(errors="replace"))
        return match[1] if match else None
    return None


def _driver_gpus() -> dict[str, int]:
    """Return the number of GPUs of the node by model, as listed by the driver."""
    models: Counter[str] = Counter()
    with suppress(OSError):
        for path in _PROC.glob("gpus/*/information"):
            match = re.search(r"^Model:\s*(.+?)\s*$", path.read_text(errors="replace"), re.MULTILINE)
            models.update([match[1]] if match else [])
    return dict(models)


def _world_size() -> int | None:
    """Return the number of processes of torch.distributed; None if it is not initialized."""
    torch: Any = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return int(distributed.get_world_size())
