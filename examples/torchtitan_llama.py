"""torchtitan's Llama on packed blocks of tokens; a run may go on with another number of data-parallel ranks.

datasvc ingest texts/ books --tokenizer tokenizer.json --block-tokens 256
torchrun --nproc-per-node 4 examples/torchtitan_llama.py --repo REPO --data books@1 --name llama --steps 100
torchrun --nproc-per-node 2 examples/torchtitan_llama.py --repo REPO --data books@1 --name llama --steps 200

The training is that of torchtitan's Trainer: pip install 'torchtitan>=0.3' triton. The loader and the checkpoints are
of datasvc. The second command continues the checkpoint of the first on two ranks instead of four, and serves the
blocks that are left. torchtitan's own loader refuses a checkpoint of another number of data ranks.
"""

import argparse
import os
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

import datasvc
from datasvc.integrations.torchtitan import TitanLoader, TitanVersions


def main() -> None:
    """Train up to a step, and log the loss of each step over all ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--name", required=True, help="model name of the checkpoints; the newest one is continued")
    parser.add_argument("--steps", type=int, required=True, help="step at which the run ends, and saves")
    parser.add_argument("--save-every", type=int, default=100, help="steps between versions; the end is saved too")
    parser.add_argument("--global-batch", type=int, default=32, help="blocks of all ranks")
    parser.add_argument("--flavor", default="debugmodel", help="a size of torchtitan's Llama")
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share each layer; they get equal batches")
    parser.add_argument("--lr", type=float, default=3e-4)
    args = parser.parse_args()

    block = len(datasvc.open(args.repo).dataset(args.data)["train"][0]["tokens"])
    data_ranks = int(os.environ.get("WORLD_SIZE", "1")) // args.tensor
    model = model_registry(args.flavor)
    if not torch.cuda.is_available():
        # torchtitan's attention for language models has no backward pass on CPUs.
        for layer in model.model.layers:
            layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = Trainer.Config(
        model_spec=model,
        loss=CrossEntropyLoss.Config(),
        tokenizer=NoTokenizer.Config(),
        optimizer=default_adamw(lr=args.lr),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, total_steps=10_000),
        training=TrainingConfig(
            local_batch_size=args.global_batch // data_ranks,
            seq_len=block,
            steps=args.steps,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        dataloader=TitanLoader.Config(dataset=args.data, dataset_path=args.repo, options={"seed": 1}),
        checkpoint=TitanVersions.Config(
            enable=True, repo=args.repo, name=args.name, interval=args.save_every, async_mode="async"
        ),
        parallelism=ParallelismConfig(tensor_parallel_degree=args.tensor),
        metrics=MetricsProcessor.Config(log_freq=1),
        debug=DebugConfig(seed=0),
        activation_checkpoint=None,
    )
    trainer = config.build()
    trainer.train()
    trainer.close()
    if dist.get_rank() == 0:
        print(f"saved {trainer.checkpointer.version}")
    dist.destroy_process_group()


class NoTokenizer(BaseTokenizer):
    """The blocks are tokens already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        """It has no settings."""

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()
        self.config = config

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        """Raise NotImplementedError."""
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        """Raise NotImplementedError."""
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        """Raise NotImplementedError."""
        raise NotImplementedError


if __name__ == "__main__":
    main()
