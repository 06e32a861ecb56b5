"""Named ranges around the stages of a loader, for torch's profiler and for tools that read NVTX (Nsight Systems).

A range is opened only while somebody records. Otherwise a stage pays for a look at two flags, and torch is never
imported for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from datasvc.loaders.profiling.step_times import Stage

BATCH: Final = "batch"
"""A whole call for a batch."""
WAIT: Final = "wait"
"""A call's wait for a stage that other threads work on."""

# Whether a shard was resident is decided while it is opened, after its range began: one name for the three stages.
_OPENING: Final = frozenset({Stage.ORIGIN, Stage.PEER, Stage.CACHE})
_NAMES: Final[Mapping[str, str]] = {
    **{stage: f"datasvc.loader.{'shard' if stage in _OPENING else stage}" for stage in Stage},
    **{kind: f"datasvc.loader.{kind}" for kind in (BATCH, WAIT)},
}


def is_under_nvtx_tool(environ: Mapping[str, str]) -> bool:
    """Return whether a tool that reads NVTX started this process, or `DATASVC_NVTX=1` asks for its ranges."""
    # Every tool hooks into NVTX by an injection library; Nsight Systems names its session too.
    tools = ("NVTX_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
    asked = environ.get("DATASVC_NVTX", "").strip().lower() not in {"", "0", "false", "no", "off"}
    return asked or any(environ.get(name) for name in tools)


_IS_UNDER_NVTX_TOOL: Final = is_under_nvtx_tool(os.environ)


def open_range(kind: str) -> Callable[[], object] | None:
    """Open the range of a stage, `BATCH` or `WAIT` in this thread.

    Returns:
        What closes it; None where nobody records.
    """
    if _IS_UNDER_NVTX_TOOL:
        return _open_nvtx(kind)
    # This flag is of the process. torch's public checks are of the calling thread, and miss the decoding threads.
    profiler: Any = sys.modules.get("torch.autograd.profiler")
    if profiler is None or not profiler._is_profiler_enabled:  # noqa: SLF001 - see above
        return None
    recorded = profiler.record_function(_NAMES[kind])
    recorded.__enter__()
    return lambda: recorded.__exit__(None, None, None)


def _open_nvtx(kind: str) -> Callable[[], object] | None:
    torch: Any = sys.modules.get("torch")
    if torch is None or torch.version.cuda is None:  # other builds have no NVTX
        return None
    torch.cuda.nvtx.range_push(_NAMES[kind])
    close: Callable[[], object] = torch.cuda.nvtx.range_pop
    return close
