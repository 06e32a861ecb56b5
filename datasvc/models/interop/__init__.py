"""Import and export models in other file formats: safetensors, Hugging Face folders, torch.save, DCP, ONNX."""

from datasvc.models.interop.distributed_export import export_distributed
from datasvc.models.interop.exporting import FORMATS, ModelExport, export_model
from datasvc.models.interop.importing import ImportReport, import_model

__all__ = ["FORMATS", "ImportReport", "ModelExport", "export_distributed", "export_model", "import_model"]
