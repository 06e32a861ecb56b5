"""Trains a small model on each of the given layouts in turn; rank 0 prints losses and sizes as a line of JSON each.

Argument: a list of settings as JSON. Beside those of a run, they have the number of "steps" and of "layers", and
whether blocks have several "documents". The model is a GPT; settings with another "model" train it on images.
"""

import json
import sys

import torch

import datasvc.trainer as hvd
from datasvc.trainer.recipes.build import build_learner, compile_model
from datasvc.trainer.recipes.choose_layout import choose_layout
from datasvc.trainer.recipes.layouts.optimizer import LayoutOptimizer
from datasvc.trainer.recipes.layouts.shard import to_local
from datasvc.trainer.recipes.settings.config import TrainConfig, plan_batches
from datasvc.trainer.recipes.start import choose_place
from datasvc.trainer.recipes.tasks.classification import Classification
from datasvc.trainer.recipes.tasks.language import LanguageModelling
from datasvc.trainer.recipes.tasks.task import Examples, evaluate
from datasvc.trainer.recipes.update import update

VOCABULARY, BLOCK, BATCH, NUM_CLASSES = 29, 8, 8, 4
MODEL = ("heads=4", "width=32", "dropout=0.0", f"context={BLOCK}")


def draw(step, *, documents):
    """Blocks in which each token follows from the one before, but for some; the last label of a block is unknown."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(VOCABULARY, (BATCH, 1), generator=generator)
    tokens = (starts + 3 * torch.arange(BLOCK)) % VOCABULARY
    noise = torch.randint(VOCABULARY, (BATCH, BLOCK), generator=generator)
    tokens = torch.where(torch.rand(BATCH, BLOCK, generator=generator) < 0.2, noise, tokens)
    targets = torch.cat([tokens[:, 1:], torch.full((BATCH, 1), -100)], 1)
    extra = {}
    if documents:
        starts = torch.tensor([0, 0, 0, 1, 1, 1, 1, 2]).expand(BATCH, BLOCK)
        positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 0]).expand(BATCH, BLOCK)
        extra = {"document_ids": starts.int().contiguous(), "position_ids": positions.contiguous()}
    return Examples(tokens, targets, torch.ones(BATCH, dtype=torch.bool), extra)


class Images(Classification):
    """Classification without a data set."""

    def __init__(self, config):
        self._config, self._num_classes = config, NUM_CLASSES


def draw_images(step):
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, 16, 16, generator=generator)
    return Examples(images, torch.arange(BATCH) % NUM_CLASSES, torch.ones(BATCH, dtype=torch.bool))


def own_part(examples, place):
    size = BATCH // place.world_size
    return list(examples.split(size))[place.rank]


def local_bytes(tensors):
    return sum(to_local(tensor).numel() * tensor.element_size() for tensor in tensors if torch.is_tensor(tensor))


def run(steps, layers=2, documents=False, **settings):
    is_image_model = "model" in settings
    gpt = {"model": "gpt", "model_option": (f"layers={layers}", *MODEL), "vocabulary": VOCABULARY}
    config = TrainConfig(
        **{
            "data": "tokens@1",
            "repo": "unused",
            "name": "unused",
            **({} if is_image_model else gpt),
            "global_batch": BATCH,
            "optimizer": "adamw",
            "learning_rate": 3e-3,
            "clip_norm": 0.5,
            "ema_decay": 0.9,
            **settings,
        }
    )
    layout = choose_layout(config, hvd.size())
    batches, place = plan_batches(config, layout.num_data_ranks), choose_place(config, layout)
    task = Images(config) if is_image_model else LanguageModelling(config, None)
    task.unpack = lambda batch, device: batch
    torch.manual_seed(0)
    learner = build_learner(config, task, batches, place, layout, block=BLOCK)
    compile_model(learner.model, config.compile)

    def part_of(step):
        return own_part(draw_images(step) if is_image_model else draw(step, documents=documents), place)

    learner.shares_loss, losses = True, []
    for step in range(steps):
        losses.append(float(update(learner, part_of(step))))
    held_out = [part_of(1000 + number) for number in range(2)]
    device = torch.device("cpu")
    metrics = evaluate(task, learner.model, held_out, device, "fp32", learner.divided)
    with learner.average.applied():
        averaged = evaluate(task, learner.model, held_out, device, "fp32", learner.divided)
    state = learner.optimizer.state_dict()  # with ZeRO-1, every rank must call it
    states = learner.optimizer.states if isinstance(learner.optimizer, LayoutOptimizer) else state["state"]
    sizes = {
        "parameter_bytes": local_bytes(learner.model.parameters()),
        "optimizer_bytes": local_bytes(value for state in states.values() for value in state.values()),
    }
    all_sizes = hvd.allgather_object(sizes)
    return {
        "losses": losses,
        "val_loss": metrics["val_loss"],
        "ema_val_loss": averaged["val_loss"],
        **{name: max(each[name] for each in all_sizes) for name in sizes},
    }


def main():
    torch.set_num_threads(1)
    hvd.init()
    for settings in json.loads(sys.argv[1]):
        result = run(**settings)
        if hvd.rank() == 0:
            sys.stdout.write(json.dumps(result) + "\n")
            sys.stdout.flush()
    hvd.shutdown()


main()
