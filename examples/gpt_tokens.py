"""A small GPT on packed blocks of tokens; documents in one block do not see each other.

datasvc ingest texts/ books --tokenizer tokenizer.json --block-tokens 1024
python -m datasvc.trainer.launch -np 2 python examples/gpt_tokens.py --repo REPO --data books@1 --vocabulary 50257
"""

import argparse

import torch
from torch.nn import functional

import datasvc
import datasvc.trainer as hvd
from datasvc.loaders import DataRanks, TokenLoader
from datasvc.trainer.recipes.models import build_model


def main() -> None:
    """Train for some epochs and print the loss of each, per token and over all ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repo", required=True)
    parser.add_argument("--data", required=True)
    parser.add_argument("--vocabulary", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=8, help="blocks of each rank")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=3e-4)
    args = parser.parse_args()

    hvd.init()
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    loader = TokenLoader(
        datasvc.open(args.repo).dataset(args.data)["train"],
        batch_size=args.batch_size,
        training=True,
        labels="within",
        documents=True,
        ranks=DataRanks(hvd.rank(), hvd.size()),
    )
    shape = {"layers": args.layers, "heads": args.heads, "width": args.width, "context": args.context}
    model = build_model("gpt", args.vocabulary, **shape).to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=args.lr), named_parameters=model.named_parameters(), op=hvd.Sum
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)

    with loader:
        for epoch in range(args.epochs):
            totals = torch.zeros(2, dtype=torch.float64)  # loss, tokens
            for batch in loader:
                tokens, labels = batch.tokens.to(device), batch.labels.to(device)
                logits = model(
                    tokens, document_ids=batch.document_ids.to(device), position_ids=batch.position_ids.to(device)
                )
                optimizer.zero_grad()
                # Labels of -100, at the end of a document and in padding, do not count. So ranks have different
                # numbers of them, perhaps none; each divides by that of all, and the gradients add up to the mean's.
                loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
                num_tokens = int((labels >= 0).sum())
                num_in_all = int(hvd.allreduce(torch.tensor(num_tokens), name="num_tokens", op=hvd.Sum))
                (loss / max(num_in_all, 1)).backward()
                optimizer.step()
                totals += torch.tensor([loss.item(), num_tokens], dtype=torch.float64)
            loss_sum, num_tokens = hvd.allreduce(totals, name="totals", op=hvd.Sum).tolist()
            if hvd.rank() == 0:
                print(f"epoch {epoch}: loss {loss_sum / max(num_tokens, 1):.3f} over {num_tokens:.0f} tokens")
    hvd.shutdown()


if __name__ == "__main__":
    main()
