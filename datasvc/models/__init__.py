"""Model versions: checkpoints whose tensors are objects and whose entry says what they came from."""

from datasvc.models.provenance.find_consumers import saw
from datasvc.models.provenance.lineage import Lineage, read_lineage
from datasvc.models.provenance.sample_uses import Saw, Sighting, VersionSaw
from datasvc.models.registry.registry import ModelVersion, describe_model, list_models, model_log
from datasvc.models.restoring.checkpoint import Checkpoint, restore, save
from datasvc.models.saving.manager import Model
from datasvc.models.saving.queue import SaveHandle
from datasvc.models.versions.code_revision import CodeRevision, describe_code
from datasvc.models.versions.data_use import DataUse, Reading, ReadLoader, Span
from datasvc.models.versions.environment import describe_environment

__all__ = [
    "Checkpoint",
    "CodeRevision",
    "DataUse",
    "Lineage",
    "Model",
    "ModelVersion",
    "ReadLoader",
    "Reading",
    "SaveHandle",
    "Saw",
    "Sighting",
    "Span",
    "VersionSaw",
    "describe_code",
    "describe_environment",
    "describe_model",
    "list_models",
    "model_log",
    "read_lineage",
    "restore",
    "save",
    "saw",
]
