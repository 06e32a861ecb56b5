"""`repo.models`: save, restore, find, compare, check, keep, convert and copy model versions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from datasvc.api.operation import Collection, Operation
from datasvc.models.interop import export_distributed, export_model, import_model
from datasvc.models.interop.artefact_files import attach, fetch_artefacts
from datasvc.models.interop.onnx_file import export_onnx
from datasvc.models.interop.open_tensors import open_safetensors
from datasvc.models.provenance.evaluated import find_evaluated
from datasvc.models.provenance.find_consumers import find_consumers
from datasvc.models.provenance.forgetting import plan_forget
from datasvc.models.provenance.lineage import read_lineage
from datasvc.models.registry.compare import compare_versions
from datasvc.models.registry.diff import diff
from datasvc.models.registry.graph import read_history
from datasvc.models.registry.registry import describe_model, describe_versions, list_models, model_log, stored_size
from datasvc.models.registry.retention import remove, retain
from datasvc.models.registry.verify import lost_versions, verify, verify_and_repair
from datasvc.models.restoring.load_into_module import load_version_into
from datasvc.models.restoring.restore import restore
from datasvc.models.saving.manager import CheckpointManager
from datasvc.models.saving.save import save
from datasvc.models.search.query import find_versions, query_versions
from datasvc.models.transfer import TransferReport, transfer
from datasvc.models.versions.artefacts import artefacts, detach
from datasvc.models.versions.signing import sign, signers
from datasvc.progress import NO_PROGRESS, Progress
from datasvc.replay.batch_at import batch_at
from datasvc.repository import Repository


class Models(Collection):
    """The models of a repository: `repo.models`."""

    kind = "models"

    save = Operation(save)
    restore = Operation(restore)
    load_into = Operation(load_version_into)
    open_safetensors = Operation(open_safetensors)
    manager = Operation(CheckpointManager)

    ls = Operation(list_models)
    log = Operation(model_log)
    history = Operation(read_history)
    describe = Operation(describe_model)
    describe_versions = Operation(describe_versions)
    best = Operation(Repository.best)
    find = Operation(find_versions)
    sql = Operation(query_versions)
    diff = Operation(diff)
    compare = Operation(compare_versions)
    trained_on = Operation(find_consumers)
    plan_forget = Operation(plan_forget)
    lineage = Operation(read_lineage)
    batch_at = Operation(batch_at)
    find_evaluated = Operation(find_evaluated)

    verify = Operation(verify)
    repair = Operation(verify_and_repair)
    lost_versions = Operation(lost_versions)
    sign = Operation(sign)
    signers = Operation(signers)
    stored_size = Operation(stored_size)
    remove = Operation(remove)
    retain = Operation(retain)

    import_ = Operation(import_model)
    export = Operation(export_model)
    export_distributed = Operation(export_distributed)
    export_onnx = Operation(export_onnx)
    push = Operation(transfer)

    attach = Operation(attach)
    detach = Operation(detach)
    artefacts = Operation(artefacts)
    fetch_artefacts = Operation(fetch_artefacts)

    def pull(
        self,
        origin: Repository | str,
        refs: Sequence[str],
        *,
        name: str | None = None,
        with_parents: bool = False,
        with_data: bool = False,
        data_names: Mapping[str, str] | None = None,
        trusted_keys: Sequence[str | Path] | None = None,
        with_tags: bool = False,
        dry_run: bool = False,
        progress: Progress = NO_PROGRESS,
    ) -> TransferReport:
        """Copy model versions from `origin`, a repository or its URL; for arguments and errors, see `transfer`."""
        # The signature repeats that of `transfer`, so that editors show it; a test compares the two. Copy `locals()`,
        # because a debugger may add variables to it.
        options = dict(locals())
        del options["self"], options["origin"]
        return transfer(origin, self.repository, **options)
