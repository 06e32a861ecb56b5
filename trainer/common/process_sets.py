"""The public names of `horovod.common.process_sets`."""

from __future__ import annotations

from datasvc.trainer.job.process_sets import ProcessSet, add_process_set, global_process_set, remove_process_set

__all__ = ["ProcessSet", "add_process_set", "global_process_set", "remove_process_set"]
