"""The runs of experiment trackers that a version belongs to: their ids, in the configuration of the version.

`datasvc train --log-to` and `datasvc.integrations` write and read them alike, so that each continues the run of the
other. A tracker has one active run in a process, and so one field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

TRACKERS: Final = ("mlflow", "wandb")


def config_of_run(tracker: str, run_id: str) -> dict[str, str]:
    """Return the field by which the configuration of a version names a run of a tracker of `TRACKERS`."""
    assert tracker in TRACKERS, tracker
    return {f"{tracker}_run": run_id}


def runs_in_config(config: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the ids of the runs that the configuration of a version names, by tracker."""
    fields = {tracker: (config or {}).get(f"{tracker}_run") for tracker in TRACKERS}
    return {tracker: run_id for tracker, run_id in fields.items() if isinstance(run_id, str)}
