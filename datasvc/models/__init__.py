"""Versions of models: checkpoints with deduplicated tensors, and log entries that record data, code and parents."""

from datasvc.models.provenance.find_consumers import find_consumers
from datasvc.models.provenance.lineage import Lineage, read_lineage
from datasvc.models.provenance.sample_uses import ConsumerReport, SampleUse, VersionUses
from datasvc.models.registry.registry import ModelVersion, describe_model, list_models, model_log
from datasvc.models.registry.retention import RetentionPolicy
from datasvc.models.restoring.load_into_module import load_into
from datasvc.models.restoring.restore import Checkpoint, restore
from datasvc.models.saving.manager import CheckpointManager
from datasvc.models.saving.save import save
from datasvc.models.saving.save_task import SaveHandle
from datasvc.models.versions.code_revision import CodeRevision, describe_code
from datasvc.models.versions.data_use import ConsumptionTracker, DataUse, ReadLoader, ReadSpan
from datasvc.models.versions.environment import describe_environment
from datasvc.models.versions.signing_keys import load_private_key, make_key

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "CodeRevision",
    "ConsumerReport",
    "ConsumptionTracker",
    "DataUse",
    "Lineage",
    "ModelVersion",
    "ReadLoader",
    "ReadSpan",
    "RetentionPolicy",
    "SampleUse",
    "SaveHandle",
    "VersionUses",
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
