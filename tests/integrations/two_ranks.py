"""A training with dropout on the ranks of torchrun, with one of the frameworks. Rank 1 is killed once."""

import logging
import os
import signal
import sys
from functools import partial

import torch
from torch import nn

import datasvc
from datasvc.loaders import DataRanks, ImageLoader

BATCH, STEPS, EVERY = 4, 12, 2


class KillOnce(logging.Handler):
    """Kills rank 1 when it logs a save of a step from `step` on, unless the marker exists."""

    def __init__(self, marker, step):
        super().__init__()
        self.marker, self.step = marker, step

    def emit(self, record):
        message = record.getMessage()
        if os.environ["RANK"] != "1" or not message.startswith("step ") or os.path.exists(self.marker):
            return
        if int(message.split()[1].rstrip(":")) >= self.step:
            open(self.marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)


def make_net():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Dropout(0.3), nn.Linear(3 * 8 * 8, 4))
    torch.manual_seed(int(os.environ["RANK"]))  # each rank draws its own numbers
    return net


def train_lightning(repo, name):
    import lightning

    from datasvc.integrations.lightning import SplitsModule, VersionCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def training_step(self, batch, _):
            images, labels = batch
            return nn.functional.cross_entropy(self.net(images), labels % 4)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters())

    data = SplitsModule(repo.dataset("pets@1"), partial(ImageLoader, batch_size=BATCH, size=8))
    versions = VersionCallback(repo, name, every=EVERY)
    options = {"enable_checkpointing": False, "logger": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_steps=STEPS,
        use_distributed_sampler=False,
        callbacks=[versions],
        **options,
    )
    trainer.fit(Module(), data, ckpt_path=versions.checkpoints.newest())


def train_accelerate(repo, name):
    import accelerate

    from datasvc.integrations.accelerate import AcceleratorVersions

    accelerator = accelerate.Accelerator(cpu=True)
    net = make_net()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    ranks = DataRanks(accelerator.process_index, accelerator.num_processes)
    loader = ImageLoader(repo.dataset("pets@1")["train"], batch_size=BATCH, training=True, size=8, ranks=ranks)
    objects = {"net": net, "optimizer": optimizer}
    with loader, AcceleratorVersions(accelerator, repo, name, objects, loader=loader, every=EVERY) as versions:
        step = versions.restore()
        while step < STEPS:
            for images, labels in loader:
                accelerator.backward(nn.functional.cross_entropy(net(images), labels % 4))
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                versions.step(step, is_last=step == STEPS)
                if step == STEPS:
                    break


def train_transformers(repo, name):
    import transformers

    from datasvc.integrations.transformers import OrderedTrainer, VersionsOfTrainer
    from datasvc.loaders.torch import Dataset

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def forward(self, x, labels):
            return {"loss": nn.functional.cross_entropy(self.net(x), labels)}

    def to_inputs(sample):
        pixels = torch.from_numpy(sample["image"]).permute(2, 0, 1)[:, :8, :8].float() / 255
        return {"x": pixels, "labels": sample["label"] % 4}

    folder = f"{repo.repository.url.removeprefix('file://')}-{name}"
    args = transformers.TrainingArguments(
        output_dir=f"{folder}/output",
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    versions = VersionsOfTrainer(repo, name, every=EVERY)
    dataset = Dataset(repo.dataset("pets@1")["train"], decode="numpy", transform=to_inputs)
    trainer = OrderedTrainer(Net(), args, train_dataset=dataset, callbacks=[versions])
    torch.manual_seed(int(os.environ["RANK"]))  # the trainer has set one seed on all ranks
    trainer.train(resume_from_checkpoint=versions.fetch(args, f"{folder}/fetched"))


def main(framework, url, name, marker, step):
    logger = logging.getLogger("datasvc.integrations")
    logger.setLevel(logging.INFO)
    logger.addHandler(KillOnce(marker, int(step)))
    {"lightning": train_lightning, "accelerate": train_accelerate, "transformers": train_transformers}[framework](
        datasvc.open(url), name
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
