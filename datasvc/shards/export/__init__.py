"""Write data-set versions as files of other formats, for `datasvc export`: one module per format."""

from datasvc.shards.export.export_format import WrittenFiles
from datasvc.shards.export.exporter import FORMATS, ExportReport, export

__all__ = ["FORMATS", "ExportReport", "WrittenFiles", "export"]
