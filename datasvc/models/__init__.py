"""Model versions: checkpoints whose tensors are objects and whose entry says what they came from."""

from datasvc.models.checkpoint import Checkpoint, restore, save
from datasvc.models.code import CodeRevision, describe_code
from datasvc.models.data_use import DataUse, Reading, ReadLoader, Span
from datasvc.models.environment import describe_environment
from datasvc.models.lineage import Lineage, read_lineage
from datasvc.models.model import Model
from datasvc.models.registry import ModelVersion, describe_model, list_models, model_log
from datasvc.models.saver import SaveHandle
from datasvc.models.saw import saw
from datasvc.models.sightings import Saw, Sighting, VersionSaw

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
