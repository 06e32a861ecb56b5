"""Named ranges around the engine's work, for torch's profiler and for tools that read NVTX (Nsight Systems).

Without a profiler, a range only checks two flags.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import profiler

from datasvc.trainer.env.environment import is_under_nvtx_tool

_OFF = nullcontext()
_IS_UNDER_NVTX_TOOL = torch.version.cuda is not None and is_under_nvtx_tool(os.environ)


def profiled(work: str) -> AbstractContextManager[object]:
    """Return a context manager for a range `datasvc.engine.<work>` in this thread."""
    if _IS_UNDER_NVTX_TOOL:
        nvtx: AbstractContextManager[object] = torch.cuda.nvtx.range(f"datasvc.engine.{work}")
        return nvtx
    # Read this global flag: torch's public checks are per thread, and the user starts the profiler in another thread.
    if not profiler._is_profiler_enabled:  # noqa: SLF001 - see above
        return _OFF
    return profiler.record_function(f"datasvc.engine.{work}")
