"""Versions of models: checkpoints with deduplicated tensors, and log entries that record data, code and parents.

A name imports its module when it is first used. Most of these modules import torch, which takes seconds. A program
that first checks its settings, with modules that do not need torch, can report a mistake at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from datasvc.models.local.local_saves import LocalSaves, LocalVersion, SaveTo
    from datasvc.models.provenance.find_consumers import find_consumers
    from datasvc.models.provenance.lineage import Lineage, read_lineage
    from datasvc.models.provenance.sample_uses import ConsumerReport, SampleUse, VersionUses
    from datasvc.models.registry.registry import ModelVersion, ModelVersions, describe_model, list_models, model_log
    from datasvc.models.registry.retention import RetentionPolicy
    from datasvc.models.restoring.load_into_module import load_into
    from datasvc.models.restoring.restore import Checkpoint, restore
    from datasvc.models.saving.manager import CheckpointManager
    from datasvc.models.saving.queue import SaveHandle
    from datasvc.models.saving.save import save
    from datasvc.models.versions.architecture import Architecture, describe_architecture
    from datasvc.models.versions.code_revision import CodeRevision, describe_code, describe_environment
    from datasvc.models.versions.data_use import ConsumptionTracker, DataUse, ReadLoader, ReadSpan
    from datasvc.models.versions.metadata import Execution
    from datasvc.models.versions.signing import load_private_key, make_key

__all__ = [
    "Architecture",
    "Checkpoint",
    "CheckpointManager",
    "CodeRevision",
    "ConsumerReport",
    "ConsumptionTracker",
    "DataUse",
    "Execution",
    "Lineage",
    "LocalSaves",
    "LocalVersion",
    "ModelVersion",
    "ModelVersions",
    "ReadLoader",
    "ReadSpan",
    "RetentionPolicy",
    "SampleUse",
    "SaveHandle",
    "SaveTo",
    "VersionUses",
    "describe_architecture",
    "describe_code",
    "describe_environment",
    "describe_model",
    "find_consumers",
    "list_models",
    "load_into",
    "load_private_key",
    "make_key",
    "model_log",
    "read_lineage",
    "restore",
    "save",
]

# The module of each public name.
_MODULES = {
    "find_consumers": "provenance.find_consumers",
    "Lineage": "provenance.lineage",
    "read_lineage": "provenance.lineage",
    "ConsumerReport": "provenance.sample_uses",
    "SampleUse": "provenance.sample_uses",
    "VersionUses": "provenance.sample_uses",
    "ModelVersion": "registry.registry",
    "ModelVersions": "registry.registry",
    "describe_model": "registry.registry",
    "list_models": "registry.registry",
    "model_log": "registry.registry",
    "RetentionPolicy": "registry.retention",
    "load_into": "restoring.load_into_module",
    "LocalSaves": "local.local_saves",
    "LocalVersion": "local.local_saves",
    "SaveTo": "local.local_saves",
    "Checkpoint": "restoring.restore",
    "restore": "restoring.restore",
    "CheckpointManager": "saving.manager",
    "save": "saving.save",
    "SaveHandle": "saving.queue",
    "Architecture": "versions.architecture",
    "describe_architecture": "versions.architecture",
    "CodeRevision": "versions.code_revision",
    "describe_code": "versions.code_revision",
    "ConsumptionTracker": "versions.data_use",
    "DataUse": "versions.data_use",
    "ReadLoader": "versions.data_use",
    "ReadSpan": "versions.data_use",
    "describe_environment": "versions.code_revision",
    "Execution": "versions.metadata",
    "load_private_key": "versions.signing",
    "make_key": "versions.signing",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'datasvc.models' has no attribute {name!r}")
    # Python calls this function only for names that the module lacks: the next access does not import.
    value = globals()[name] = getattr(importlib.import_module(f"datasvc.models.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
