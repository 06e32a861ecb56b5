"""torchtitan's Llama on packed blocks of tokens; a run may go on with another number of data-parallel ranks.

datasvc ingest texts/ books --tokenizer tokenizer.json --block-tokens 256
torchrun --nproc-per-node 4 examples/torchtitan_llama.py --repo REPO --data books@1 --name llama --steps 100
torchrun --nproc-per-node 2 examples/torchtitan_llama.py --repo REPO --data books@1 --name llama --steps 200

The model and its sharding are torchtitan's: pip install torchtitan==0.1.0 tyro
The loader and the checkpoints are of datasvc. The second command continues the checkpoint of the first on two ranks
instead of four, and serves the blocks that are left. torchtitan's own loader refuses a checkpoint of another number
of data ranks.
"""

import argparse
import copy
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torchtitan.config_manager import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models.llama3 import Transformer, llama3_configs, parallelize_llama

import datasvc
from datasvc.loaders import DataRanks, TokenBatch, TokenLoader
from datasvc.models import ConsumptionTracker
from datasvc.models.dcp import DcpReader, DcpWriter


def main() -> None:
    """Train up to a step, and print the loss of each step over all ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--name", required=True, help="model name of the checkpoints; the newest one is continued")
    parser.add_argument("--steps", type=int, required=True, help="step at which the run ends, and saves")
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
    model = build_model(args, loader.block_tokens, mesh, ranks, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    step, parent = 0, None
    if datasvc.open(args.repo).models.versions(args.name):
        reader = DcpReader(args.repo, name=args.name)
        weights, moments = get_state_dict(model, optimizer)
        # The state of the loader is a position in the access order. It does not depend on the number of data ranks.
        state = {"model": weights, "optimizer": moments, "loader": loader.state_dict(), "step": 0}
        dcp.load(state, storage_reader=reader)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        loader.load_state_dict(state["loader"])
        step, parent = state["step"], str(reader.version)
    reading = ConsumptionTracker(loader, step=step)

    with loader:
        while step < args.steps:
            for batch in loader:
                loss = train_step(model, optimizer, batch, device)
                if dist.get_rank() == 0:
                    print(f"step {step}: loss {loss:.6f}", flush=True)
                step += 1
                if step == args.steps:
                    break
        weights, moments = get_state_dict(model, optimizer)
        saved = dcp.save(
            {"model": weights, "optimizer": moments, "loader": loader.state_dict(), "step": step},
            storage_writer=DcpWriter(args.repo, name=args.name, step=step, parent=parent, data=[reading.use()]),
        )
    if dist.get_rank() == 0:
        print(f"saved {saved.storage_meta.reference}")
    dist.destroy_process_group()


def build_model(
    args: argparse.Namespace, block: int, mesh: DeviceMesh, ranks: ParallelDims, device: torch.device
) -> torch.nn.Module:
    """Return torchtitan's model, equal on all ranks before it is sharded."""
    model_args = copy.copy(llama3_configs[args.flavor])
    model_args.vocab_size, model_args.max_seq_len = args.vocabulary, block
    torch.manual_seed(0)
    model = Transformer(model_args)
    model.init_weights()
    config = JobConfig()
    config.activation_checkpoint.mode = "none"
    config.training.mixed_precision_param = "float32"
    return parallelize_llama(model.to(device), mesh, ranks, config)


def train_step(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: TokenBatch[torch.Tensor], device: torch.device
) -> float:
    """Take one optimizer step, and return the mean loss per token of all ranks before it."""
    tokens, labels = batch.tokens.to(device), batch.labels.to(device)
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
