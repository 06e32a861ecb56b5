"""Write data-set versions as files of other formats, for `datasvc export`: one module per format."""

from datasvc.shards.export.export_format import WrittenFiles
from datasvc.shards.export.exporter import ExportReport, export
from datasvc.shards.export.formats import FORMATS

__all__ = ["FORMATS", "ExportReport", "WrittenFiles", "export"]
