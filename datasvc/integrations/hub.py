"""The Hugging Face Hub: push a version of a model or of a data set to a repository `OWNER/NAME`, and pull a model.

A model is pushed in the layout of transformers, `config.json` with safetensors, and a data set as Parquet, which the
programs of the Hub read. Data sets are pulled by an ingest of `hf://datasets/OWNER/NAME`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from datasvc.api import DataRepository
from datasvc.errors import ConfigError, NotFoundError, UnavailableError
from datasvc.extras import explain_missing
from datasvc.integrations.tracked_version import describe_reference
from datasvc.repository.logs.copies import record_copies
from datasvc.repository.store.redaction import redact_url

with explain_missing("datasvc.integrations.hub"):
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

__all__ = ["pull_model", "push_dataset", "push_model"]

_HTTP_ERROR: Final = HfHubHTTPError.__bases__[0]  # of the HTTP library that this release of the client uses
_WEIGHTS: Final = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin*")
# Copies of the weights for other programs, which `pull_model` does not need beside safetensors.
_OTHER_WEIGHTS: Final = ("*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.onnx", "*.gguf", "*.ot")


def push_model(
    repo: DataRepository,
    ref: str,
    repo_id: str,
    *,
    private: bool = False,
    tag: str | None = None,
    api: HfApi | None = None,
    **options: Any,
) -> str:
    """Push a model version as one commit to the main branch of a repository, which is created if it does not exist.

    Files that the Hub has already are not sent again, so a push that was interrupted continues when it is repeated.
    Other files of the repository, such as its card, stay.

    Args:
        repo: repository of the version.
        ref: NAME, NAME@VERSION or NAME@TAG.
        repo_id: OWNER/NAME on the Hub.
        private: whether a repository that is created is private.
        tag: tag of the Hub to create at the commit, such as "v1".
        api: client with endpoint and token; None: those of the environment, as `hf auth login` sets them.
        **options: further arguments of `repo.models.export`, such as `dtype="bfloat16"`.

    Returns:
        OWNER/NAME@COMMIT; the commit is the `revision=` of `from_pretrained` and `load_dataset`.

    Raises:
        NotFoundError: the version does not exist.
        ConfigError: the version cannot be exported, see `repo.models.export`; or the Hub refuses the name, the token
            or the tag.
        UnavailableError: the Hub does not answer.
    """
    version, _, tags = describe_reference(repo, ref)
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        repo.models.export(version, folder, "huggingface", **options)
        (folder / "datasvc.json").write_text(json.dumps(tags, indent=1, sort_keys=True), encoding="utf-8")
        return _upload(api, folder, repo_id, "model", version, private=private, tag=tag, replaced=_WEIGHTS)


def push_dataset(
    repo: DataRepository,
    ref: str,
    repo_id: str,
    *,
    private: bool = False,
    tag: str | None = None,
    api: HfApi | None = None,
    workers: int = 1,
) -> str:
    """Push a data-set version as Parquet files `data/SPLIT-00000-of-00004.parquet`; see `push_model`.

    `workers` processes write the files. The log of copies of `repo` gets an entry, see `repo.datasets.copies`.
    """
    version = str(repo.repository.resolve("datasets", ref))
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "data"
        report = repo.datasets.export(version, str(folder), "parquet", workers=workers, record=False)
        (folder / "datasvc-export.json").unlink()
        pushed = _upload(
            api, Path(temporary), repo_id, "dataset", version, private=private, tag=tag, replaced=("data/*.parquet",)
        )
    record_copies(repo.repository.storage, [replace(report.copy, destination=f"hf://datasets/{pushed}")])
    return pushed


def pull_model(
    repo: DataRepository,
    repo_id: str,
    name: str | None = None,
    *,
    revision: str = "main",
    api: HfApi | None = None,
    **options: Any,
) -> str:
    """Import the weights of a repository as the next version of a model; return it, such as "bert@1".

    A commit that was pulled is not imported again: the version that has it is returned.

    Args:
        repo: repository to import into.
        repo_id: OWNER/NAME on the Hub.
        name: name of the model; None: NAME.
        revision: branch, tag or commit of the Hub.
        api: see `push_model`.
        **options: further arguments of `repo.models.import_`, such as `only=`.

    Raises:
        NotFoundError: the Hub has no such repository or revision, or the token may not read it.
        ConfigError: the repository has no weights in a supported format, see `repo.models.import_`.
        UnavailableError: the Hub does not answer.
    """
    client, name = api or HfApi(), name or repo_id.rpartition("/")[2]
    with _hub_errors(repo_id):
        info = client.repo_info(repo_id, revision=revision)
    message = f"hf://{repo_id}@{info.sha}"
    if repo.repository.newest("models", name) is not None:
        for version in repo.models.versions(name):
            if repo.repository.entry(version).content.get("message") == message:
                return str(version)
    files = [sibling.rfilename for sibling in info.siblings or () if "/" not in sibling.rfilename]
    ignored = _OTHER_WEIGHTS if any(file.endswith(".safetensors") for file in files) else ()
    with TemporaryDirectory() as folder:
        with _hub_errors(repo_id):
            client.snapshot_download(
                repo_id, revision=info.sha, local_dir=folder, allow_patterns=files, ignore_patterns=list(ignored)
            )
        return str(repo.models.import_(folder, name, message=message, **options).version)


def _upload(
    api: HfApi | None,
    folder: Path,
    repo_id: str,
    kind: str,
    version: str,
    *,
    private: bool,
    tag: str | None,
    replaced: tuple[str, ...],
) -> str:
    """Commit the files of a folder, and remove those of an earlier push that match `replaced`."""
    client = api or HfApi()
    with _hub_errors(repo_id):
        client.create_repo(repo_id, repo_type=kind, private=private, exist_ok=True)
        done = client.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            repo_type=kind,
            commit_message=f"datasvc: {version}",
            delete_patterns=list(replaced),
        )
        if tag is not None:
            client.create_tag(repo_id, tag=tag, revision=done.oid, repo_type=kind)
    return f"{repo_id}@{done.oid}"


@contextmanager
def _hub_errors(repo_id: str) -> Iterator[None]:
    """Raise the errors of the Hub's client as ours."""
    try:
        yield
    except (RepositoryNotFoundError, RevisionNotFoundError) as error:
        raise NotFoundError(f"the Hub has no {repo_id}, or not for this token: {error}") from error
    except HFValidationError as error:
        raise ConfigError(f"{repo_id!r} is no name of a repository: {error}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if 400 <= status < 500 and status not in (408, 429):  # too slow, or too many requests
            raise ConfigError(
                f"the Hub refuses {repo_id}: {error}; check the name, the token and its rights"
            ) from error
        raise UnavailableError(f"the Hub failed for {repo_id}: {error}; repeat the call later") from error
    except (OSError, RuntimeError, _HTTP_ERROR) as error:  # RuntimeError: an upload in a thread of the client failed
        raise UnavailableError(f"the Hub does not answer for {repo_id}: {redact_url(str(error))}") from error
