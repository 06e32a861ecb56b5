"""Named ranges around the engine's work, for torch's profiler and for tools that read NVTX (Nsight Systems).

The engine enters a range for each phase of its work. Without a profiler, entering a range only checks two flags.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import profiler

from datasvc.trainer.env.environment import is_under_nvtx_tool

_NO_RANGE = nullcontext()
_IS_UNDER_NVTX_TOOL = torch.version.cuda is not None and is_under_nvtx_tool(os.environ)


def profiled(work: str) -> AbstractContextManager[object]:
    """Return a context manager that records its block as the range `datasvc.engine.<work>` of this thread."""
    if _IS_UNDER_NVTX_TOOL:
        nvtx: AbstractContextManager[object] = torch.cuda.nvtx.range(f"datasvc.engine.{work}")
        return nvtx
    # Use torch's private flag, which is global. Its public checks are per thread, and the user starts the profiler in
    # another thread than the engine's.
    if not profiler._is_profiler_enabled:  # noqa: SLF001 - see above
        return _NO_RANGE
    return profiler.record_function(f"datasvc.engine.{work}")
