"""Run a program of torchtitan on CPUs, where its `Trainer` asks torch for properties of a GPU: PROGRAM ARGUMENTS."""

import runpy
import sys
from types import SimpleNamespace

import torch
import torchtitan.tools.utils


class Cpu:
    """What `Trainer` uses of `torch.cuda`."""

    set_device = synchronize = reset_peak_memory_stats = empty_cache = staticmethod(lambda *_: None)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    get_device_name = staticmethod(lambda _: "CPU")
    get_device_properties = staticmethod(lambda _: SimpleNamespace(total_memory=1 << 30))
    memory_stats = staticmethod(lambda _: {})


torchtitan.tools.utils.device_type, torchtitan.tools.utils.device_module = "cpu", Cpu
if not hasattr(torch.distributed, "set_timeout"):
    torch.distributed.set_timeout = lambda *_: None  # of a later torch
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
