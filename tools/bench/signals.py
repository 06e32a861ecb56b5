"""What `--signals loss` adds to a training step."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

import datasvc
from datasvc.loaders import DataRanks, DecodeConfig, ImageBatch, ImageLoader
from datasvc.runs import RunLog
from datasvc.testing import small_dataset
from datasvc.trainer.recipes.models import build_model
from datasvc.trainer.recipes.settings.config import TrainConfig
from datasvc.trainer.recipes.tasks.classification import Classification
from datasvc.trainer.recipes.tasks.task import Examples, take_outputs
from tools.bench.runner import Options, Report, bench, run_rounds

CLASSES = 10


@bench(
    repeats=11,
    steps=(2, "training steps of a round"),
    calls=(500, "calls of a round, of what is added"),
    save_every=(1000, "steps between two saves, each of which writes what was recorded"),
    batch=32,
    size=(32, "width of the images"),
    model="resnet18",
)
def signals(options: Options) -> Report:
    """Processor time that `--signals loss` adds to a step of training, part by part, in one process on one thread.

    Only the added calls are timed, not steps with and without them: their difference is below the spread of a step.
    They are the loss of each sample, from outputs that are there; `loader.record`; and, divided by the steps between
    two saves, the file that a save writes. A step is forward pass, loss, backward pass and SGD, without its data.
    """
    torch.set_num_threads(1)
    split = small_dataset(str(options.folder / "repo"), samples=options.batch, classes=CLASSES)["train"]
    repo = datasvc.open(str(options.folder / "repo"))
    task = Classification(TrainConfig(repo=repo.repository.url, data="small", name="bench"), split)
    decode = DecodeConfig("cpu", num_threads=1)
    with RunLog.open(repo.repository, "bench") as log:
        ref = log.ref
    sizes = {"batch_size": options.batch, "size": options.size}
    with ImageLoader(split, **sizes, training=True, ranks=DataRanks(), decode=decode) as loader:
        repo.runs.record(ref, loader)
        found = run_rounds(make_arms(options, task, next(iter(loader)), loader), options.repeats, warm_up=True)
    report = Report(f"Signals of {options.model}, {options.batch} images of {options.size}x{options.size}")
    added = [[a - b for a, b in zip(found["loss, each"], found["loss"], strict=True)], found["record"], found["save"]]
    names = ["loss of each sample", "record", f"file of a save / {options.save_every}"]
    report.add_row("step", "us", [1e6 * each for each in found["step"]])
    for name, values in zip(names, added, strict=True):
        report.add_row(name, "us", [1e6 * each for each in values])
        report.add_ratio(f"{name} / step", values, found["step"])
    report.add_ratio("all that is added / step", [sum(each) for each in zip(*added, strict=True)], found["step"])
    return report


def make_arms(
    options: Options, task: Classification, batch: ImageBatch[torch.Tensor], loader: ImageLoader
) -> dict[str, Callable[[], float]]:
    """Return what is timed; each arm returns the processor seconds of one step."""
    examples = task.unpack(batch, torch.device("cpu"))
    model = build_model(options.model, CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    outputs = model(examples.inputs).detach()
    losses, writer = torch.rand(options.batch), loader.signals
    assert writer is not None

    def step() -> None:
        optimizer.zero_grad()
        task.sum_loss(model, examples).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    def compute_loss(*, of_each: bool) -> None:
        task.losses = [] if of_each else None
        task.sum_loss(take_outputs, Examples(outputs, examples.targets, examples.mask))
        if task.losses is not None:
            torch.cat(task.losses)[-options.batch :]
        task.losses = None

    def save() -> float:
        for _ in range(options.save_every):
            loader.record(batch, losses)
        return seconds_of(writer.flush, 1) / float(options.save_every)

    def record() -> float:
        seconds = seconds_of(lambda: loader.record(batch, losses), options.calls)
        writer.flush()
        return seconds

    return {
        "step": partial(seconds_of, step, options.steps),
        "loss": partial(seconds_of, partial(compute_loss, of_each=False), options.calls),
        "loss, each": partial(seconds_of, partial(compute_loss, of_each=True), options.calls),
        "record": record,
        "save": save,
    }


def seconds_of(action: Callable[[], object], num_calls: int) -> float:
    """Return the processor time of a call, of all threads of this process."""
    began_s = time.process_time()
    for _ in range(num_calls):
        action()
    return (time.process_time() - began_s) / num_calls
