"""Model versions: checkpoints whose tensors are objects and whose entry says what they came from."""

from datasvc.models.checkpoint import Checkpoint, restore, save
from datasvc.models.lineage import CodeRevision, DataUse, describe_code
from datasvc.models.registry import ModelVersion, describe_model, list_models, model_log

__all__ = [
    "Checkpoint",
    "CodeRevision",
    "DataUse",
    "ModelVersion",
    "describe_code",
    "describe_model",
    "list_models",
    "model_log",
    "restore",
    "save",
]
