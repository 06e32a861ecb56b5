"""Ranks of a pipeline, of which one kills or stops itself in a step or an evaluation; the others print their report.

Arguments: the layout, the rank that does, "step" or "evaluation", and "SIGKILL" or "SIGSTOP".
"""

import os
import signal
import sys
import time

import torch
from torch import nn

import datasvc.trainer as hvd
from datasvc.planning.layout import parse_layout
from datasvc.trainer.recipes.layouts.divided_model import LayoutOptions, apply_layout
from datasvc.trainer.recipes.layouts.lost_ranks import LostRankWatch, explaining_lost_ranks
from datasvc.trainer.recipes.models.gpt import GPT


class Signalled(nn.Module):
    """A layer that ends its process, in the backward pass if there is one: neighbours wait for it on both sides."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def forward(self, x):
        if not torch.is_grad_enabled():
            os.kill(os.getpid(), self.number)
        x.register_hook(lambda _gradient: os.kill(os.getpid(), self.number))
        return x


def main():
    torch.set_num_threads(1)
    # The launcher ends the other ranks as soon as one is lost; here they report it first.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    hvd.init()
    text, lost, work, number = sys.argv[1], int(sys.argv[2]), sys.argv[3], signal.Signals[sys.argv[4]]
    model = GPT(11, context=8, layers=hvd.size(), heads=2, width=8, dropout=0.0)
    layout = parse_layout(text, hvd.size())
    divided = apply_layout(
        model, layout, LayoutOptions(), rank=hvd.rank(), device=torch.device("cpu"), num_micro_batches=4
    )
    rank = hvd.rank()
    tokens = torch.zeros(4, 8, dtype=torch.long)

    def step():
        divided.pipeline.step(tokens, tokens, {}, lambda outputs, _targets: outputs.sum())
        divided.sum_over_copies(torch.zeros(()))

    def evaluate():
        with torch.no_grad():
            divided.pipeline.evaluate(tokens, {})
        divided.sum_over_copies(torch.zeros(()))

    step()
    if rank == lost:
        block = next(iter(divided.modules[0].blocks.values()))
        block.mlp.append(Signalled(number))
    began_s = time.monotonic()

    def report(text):
        sys.stdout.write(f"after {time.monotonic() - began_s:.1f} s: {text}\n")
        sys.stdout.flush()

    def end():
        report("ended by the watch, because its collective does not end")
        os._exit(1)

    watch = LostRankWatch(end=end)
    try:
        with explaining_lost_ranks(watch):
            step() if work == "step" else evaluate()
    except RuntimeError as error:
        report(error)
    os._exit(1)


main()
