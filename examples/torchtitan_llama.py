"""torchtitan's Llama on packed blocks of tokens; a run may go on with another number of data-parallel ranks.

datasvc ingest texts/ books --tokenizer tokenizer.json --block-tokens 256
torchrun --nproc-per-node 4 examples/torchtitan_llama.py --repo REPO --data books@1 --name llama --steps 100
torchrun --nproc-per-node 2 examples/torchtitan_llama.py --repo REPO --data books@1 --name llama --steps 200

The model and its sharding are torchtitan's: pip install 'torchtitan>=0.1.0,<0.2' tyro
The loader and the checkpoints are of datasvc. The second command continues the checkpoint of the first on two ranks
instead of four, and serves the blocks that are left. torchtitan's own loader refuses a checkpoint of another number
of data ranks.
"""

import argparse
import copy
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torchtitan.components.ft import init_ft_manager
from torchtitan.components.lr_scheduler import build_lr_schedulers
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.config_manager import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3 import Transformer, llama3_configs, parallelize_llama

import datasvc
from datasvc.integrations.torchtitan import TitanLoader, TitanVersions
from datasvc.loaders import DataRanks, TokenLoader


def main() -> None:
    """Train up to a step, and print the loss of each step over all ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--name", required=True, help="model name of the checkpoints; the newest one is continued")
    parser.add_argument("--steps", type=int, required=True, help="step at which the run ends, and saves")
    parser.add_argument("--save-every", type=int, help="steps between versions; by default, only the end is saved")
    parser.add_argument("--global-batch", type=int, default=32, help="blocks of all ranks")
    parser.add_argument("--flavor", default="debugmodel", help="a size of torchtitan's Llama")
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share each layer; they get equal batches")
    parser.add_argument("--lr", type=float, default=3e-4)
    args = parser.parse_args()

    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    device = (
        torch.device(device_type, int(os.environ["LOCAL_RANK"])) if device_type == "cuda" else torch.device("cpu")
    )
    if device_type == "cuda":
        torch.cuda.set_device(device)
    # Gloo too, for the messages of a save, which are on the CPU.
    dist.init_process_group("cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo")
    ranks = ParallelDims(
        dp_replicate=1,
        dp_shard=-1,
        cp=1,
        tp=args.tensor,
        pp=1,
        world_size=dist.get_world_size(),
        enable_loss_parallel=False,
    )
    mesh = ranks.build_mesh(device_type)
    # torchtitan's mesh has no axis of data-parallel ranks if there is only one such rank.
    data_ranks = DataRanks(mesh["dp"].get_local_rank(), mesh["dp"].size()) if ranks.dp_enabled else DataRanks()

    dataset = datasvc.open(args.repo).dataset(args.data)
    loader = TokenLoader(
        dataset["train"],
        batch_size=args.global_batch // data_ranks.world_size,
        training=True,
        labels="across",
        ranks=data_ranks,
        seed=1,
    )
    config = JobConfig()
    config.checkpoint.enable_checkpoint, config.checkpoint.interval = True, args.steps
    config.lr_scheduler.warmup_steps = 0
    model = build_model(args, config, loader.block_tokens, mesh, ranks, device)
    optimizers = OptimizersContainer([model], torch.optim.AdamW, {"lr": args.lr})
    progress = Progress()
    versions = TitanVersions(
        datasvc.open(args.repo),
        args.name,
        dataloader=TitanLoader(loader),
        model_parts=[model],
        optimizers=optimizers,
        lr_schedulers=build_lr_schedulers(optimizers, config),
        states={"train_state": progress},
        job_config=config,
        ft_manager=init_ft_manager(config),
    )
    versions.load()
    with loader:
        batches = iter(versions.states["dataloader"])
        while progress.step < args.steps:
            inputs, labels = next(batches)
            loss = train_step(model, optimizers, inputs["input"].to(device), labels.to(device))
            if dist.get_rank() == 0:
                print(f"step {progress.step}: loss {loss:.6f}", flush=True)
            progress.step += 1
            if progress.step == args.steps or (args.save_every and progress.step % args.save_every == 0):
                versions.save(progress.step, force=True)
    versions.close()
    if dist.get_rank() == 0:
        print(f"saved {versions.version}")
    dist.destroy_process_group()


class Progress(Stateful):
    """The number of steps so far, which torchtitan's `Trainer` keeps itself."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the number."""
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Set the number."""
        self.step = state_dict["step"]


def build_model(
    args: argparse.Namespace,
    config: JobConfig,
    block: int,
    mesh: DeviceMesh,
    ranks: ParallelDims,
    device: torch.device,
) -> torch.nn.Module:
    """Return torchtitan's model, equal on all ranks before it is sharded."""
    model_args = copy.copy(llama3_configs[args.flavor])
    model_args.vocab_size, model_args.max_seq_len = args.vocabulary, block
    torch.manual_seed(0)
    model = Transformer(model_args)
    model.init_weights()
    config.activation_checkpoint.mode = "none"
    config.training.mixed_precision_param = "float32"
    return parallelize_llama(model.to(device), mesh, ranks, config)


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, labels: torch.Tensor
) -> float:
    """Take one optimizer step, and return the mean loss per token of all ranks before it."""
    logits = model(tokens)
    # Each block has equally many labels, so the mean of the ranks' means is that of all blocks. FSDP averages the
    # gradients in the same way.
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    # Ranks that share the layers have equal losses, so the mean over all ranks is that over the data ranks.
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


if __name__ == "__main__":
    main()
