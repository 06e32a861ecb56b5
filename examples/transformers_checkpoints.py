"""Training with transformers, checkpoints as versions: killed and started again, it ends with the same bits.

    python examples/transformers_checkpoints.py --repo REPO --data digits@1

On one device or with DDP (`torchrun --nproc-per-node 2 ...`). The versions tell which samples they consumed.
"""

import argparse
import logging
import sys
import tempfile
from typing import Any

import torch
from transformers import TrainingArguments, ViTConfig, ViTForImageClassification

import datasvc
from datasvc.integrations.transformers import OrderedTrainer, VersionsOfTrainer
from datasvc.loaders.torch import Dataset

SIZE = 32


def to_inputs(sample: dict[str, Any]) -> dict[str, Any]:
    """Return what the model takes: pixels, `float32[3, SIZE, SIZE]`, and the label."""
    pixels = torch.from_numpy(sample["image"]).permute(2, 0, 1)[None].float() / 255
    return {"pixel_values": torch.nn.functional.interpolate(pixels, (SIZE, SIZE))[0], "labels": sample["label"]}


def main() -> None:
    """Train; continue from the newest version where there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--name", default="transformers")
    parser.add_argument("--batch-size", type=int, default=8, help="of each rank")
    parser.add_argument("--accumulation", type=int, default=1, help="batches of each step")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--every", default="10min", help='a time, "10min", or a number of steps')
    options = parser.parse_args()

    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    logging.getLogger("datasvc.integrations").setLevel(logging.INFO)  # a line for each save
    folder = tempfile.TemporaryDirectory()
    args = TrainingArguments(
        output_dir=folder.name,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=options.batch_size,
        gradient_accumulation_steps=options.accumulation,
        learning_rate=1e-3,
        save_strategy="no",  # versions take the place of its folders
        remove_unused_columns=False,  # `to_inputs` returns what the model takes
        report_to="none",
        seed=0,
    )
    repo = datasvc.open(options.repo)
    split = repo.dataset(options.data)["train"]
    every = int(options.every) if options.every.isdecimal() else options.every
    versions = VersionsOfTrainer(repo, options.name, every=every, grace="30s", config=vars(options))
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    config = ViTConfig(image_size=SIZE, patch_size=8, num_labels=len(split.classes), hidden_dropout_prob=0.1, **sizes)
    with folder:
        trainer = OrderedTrainer(
            ViTForImageClassification(config),
            args,
            train_dataset=Dataset(split, decode="numpy", transform=to_inputs),
            callbacks=[versions],
        )
        trainer.train(resume_from_checkpoint=versions.fetch(args, f"{folder.name}/resumed"))
    if versions.checkpoints.stop_signal is not None:
        sys.exit(128 + versions.checkpoints.stop_signal)


if __name__ == "__main__":
    main()
