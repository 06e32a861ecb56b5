"""Run a benchmark: `python -m tools.bench NAME [options]`, from the root of the checkout."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Final

MODULES: Final = {
    "order": "order",
    "groups": "groups",
    "mixture": "mixture",
    "ingest": "ingest",
    "attach": "attach",
    "columns": "columns",
    "ingest_samples": "ingest",
    "ingest_memory": "ingest",
    "open_version": "large_versions",
    "loader_resume": "large_versions",
    "views": "views",
    "open_view": "views",
    "models_trained_on": "large_versions",
    "loader": "loader",
    "evaluation": "loader",
    "decode_servers": "decode_servers",
    "large_photos": "large_photos",
    "small_images": "small_images",
    "tokens": "tokens",
    "attention": "tokens",
    "audio": "audio",
    "video": "video",
    "remote_video": "video",
    "shared": "shared",
    "shared_training": "shared",
    "cache": "cache",
    "store_streams": "store_streams",
    "staging": "staging",
    "trainer": "trainer",
    "negotiation": "negotiation",
    "start": "start",
    "buckets": "slow_link",
    "hierarchical": "slow_link",
    "averaging": "averaging",
    "sync_curves": "sync_curves",
    "slow_worker": "slow_worker",
    "lost_ranks": "lost_ranks",
    "compressed_gradients": "compressed_gradients",
    "compression_advice": "compressed_gradients",
    "plan_check": "plan_check",
    "layout_memory": "layout_memory",
    "profile_check": "profile_check",
    "run_log": "run_log",
    "signals": "signals",
    "loss_forecast": "loss_forecast",
    "models": "models",
    "models_sharded": "models_ranks",
    "models_local": "models_ranks",
    "models_find": "models_find",
    "metadata": "metadata",
    "pages": "ui",
    "ui_pages": "ui",
    "ui_live": "ui",
}
"""The module of each benchmark."""


def main() -> None:
    """Run the benchmark that is named, or call a function for another process: `--call MODULE:FUNCTION ARGUMENTS`."""
    name, *words = sys.argv[1:] or ["--help"]
    if name == "--call":
        # Nothing is imported before: some of these functions measure imports and memory.
        module, _, function = words[0].partition(":")
        found = getattr(importlib.import_module(module), function)(*json.loads(words[1]))
        if found is not None:
            print(json.dumps(found), flush=True)
        return
    if name not in MODULES:
        sys.exit(f"python -m tools.bench NAME [options]; NAME is one of {', '.join(MODULES)}")
    importlib.import_module(f"tools.bench.{MODULES[name]}")
    from tools.bench.runner import BENCHES

    BENCHES[name].main(name, words)


if __name__ == "__main__":
    main()
