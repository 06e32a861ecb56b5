"""How values look: HTML for notebooks, plots, reports, and the graphs and texts that pages and commands share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, Final

# The function of this room that renders the values of a class, as "module.function".
RENDERERS: Final[Mapping[str, Mapping[str, str]]] = {
    "html": {
        "Audit": "loading.audit_html",
        "ConsumerReport": "provenance.uses_html",
        "DatasetLog": "datasets.log_html",
        "DatasetVersion": "datasets.version_html",
        "Difference": "diffs.dataset_difference_html",
        "EvaluationOverlap": "provenance.evaluated_html",
        "Forecast": "loading.forecast_html",
        "ImageBatch": "loading.image_batch_html",
        "Lineage": "provenance.lineage_html",
        "ModelDifference": "diffs.model_difference_html",
        "ModelVersion": "models.version_html",
        "ModelVersions": "models.versions_html",
        "Report": "loading.report_html",
        "RunHistory": "runs.history_html",
        "Sample": "datasets.sample_html",
        "Split": "datasets.split_html",
        "TokenBatch": "loading.token_batch_html",
        "VersionComparison": "diffs.comparison_html",
    },
    "plot": {
        "Forecast": "loading.plot_forecast",
        "ModelVersions": "models.plot_metric",
        "Report": "loading.plot_report",
        "RunHistory": "runs.plot_curve",
    },
    "report": {"RunHistory": "runs.make_report"},
}


def find_renderer(kind: type, way: str) -> Callable[..., Any]:
    """Return the function that renders values of a class of this package, or of a class that is derived from one."""
    names = RENDERERS[way]
    found = next(
        names[base.__name__]
        for base in kind.__mro__
        if base.__module__.startswith("datasvc.") and base.__name__ in names
    )
    module, _, function = found.partition(".")
    renderer: Callable[..., Any] = getattr(import_module(f"{__name__}.{module}"), function)
    return renderer
