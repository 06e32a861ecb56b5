"""Model versions from and to the files of others: safetensors, Hugging Face folders, torch.save, DCP, ONNX."""

from datasvc.models.foreign.exporting import FORMATS, ModelExport, export_model
from datasvc.models.foreign.importing import ImportReport, import_model

__all__ = ["FORMATS", "ImportReport", "ModelExport", "export_model", "import_model"]
