"""Draws values as SVG and HTML text: graphs, charts and tables for the page, notebooks and files.

Every function is pure: values in, markup out. All text of data is escaped in one place, `elements`. Markup has no
`style` attribute, no style sheet and no script, so that a page whose policy is `default-src 'self'` can include it;
classes name the colours (`colours`). `standalone` adds the style sheet for a file or a notebook.
"""

from datasvc.drawing.bars import (
    HistogramBin,
    NamedBar,
    bar_chart,
    bar_table,
    histogram,
    histogram_table,
    number_head,
    value_head,
)
from datasvc.drawing.charts import chart_table, line_chart, separate_charts, small_multiples, stacked_areas
from datasvc.drawing.colours import style_sheet
from datasvc.drawing.elements import Markup, element, link, markup, standalone
from datasvc.drawing.flow import FlowEdge, FlowNode, flow_graph, flow_table
from datasvc.drawing.frame import ChartMark, ChartSeries
from datasvc.drawing.heat_maps import heat_map, heat_map_table
from datasvc.drawing.numbers import format_quantity
from datasvc.drawing.table import TableColumn, facts_table, figure, folded, html_table
from datasvc.drawing.versions import VersionNode, version_graph, version_table

__all__ = [
    "ChartMark",
    "ChartSeries",
    "FlowEdge",
    "FlowNode",
    "HistogramBin",
    "Markup",
    "NamedBar",
    "TableColumn",
    "VersionNode",
    "bar_chart",
    "bar_table",
    "chart_table",
    "element",
    "facts_table",
    "figure",
    "flow_graph",
    "flow_table",
    "folded",
    "format_quantity",
    "heat_map",
    "heat_map_table",
    "histogram",
    "histogram_table",
    "html_table",
    "line_chart",
    "link",
    "markup",
    "number_head",
    "separate_charts",
    "small_multiples",
    "stacked_areas",
    "standalone",
    "style_sheet",
    "value_head",
    "version_graph",
    "version_table",
]
