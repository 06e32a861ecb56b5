"""The small GPT of examples/: what its ranks learn together is what one would have learned."""

import re
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from datasvc.repository import Repository
from datasvc.shards import ingest
from tests.support import warm_python

EXAMPLE = Path(__file__).parents[2] / "examples" / "gpt_tokens.py"
BLOCK, VOCABULARY = 8, 11

# The example, but for dropout, which is drawn by each rank.
PROGRAM = f"""
import functools, runpy
import torch
import datasvc.trainer.recipes.models as models
torch.set_num_threads(1)
models.build_model = functools.partial(models.build_model, dropout=0.0)
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""


@pytest.fixture
def url(tmp_path):
    """Blocks that have between no and seven labels: a document of one token has none."""
    folder = tmp_path / "source" / "train"
    folder.mkdir(parents=True)
    tokens = [[(start + 3 * place) % VOCABULARY for place in range(BLOCK)] for start in range(24)]
    starts = [list(range(BLOCK)) if block % 3 else list(range(block % 8 + 1)) for block in range(24)]
    table = pa.table(
        {
            "tokens": pa.array(tokens, pa.list_(pa.int32(), BLOCK)),
            "document_starts": pa.array(starts, pa.list_(pa.int32())),
        }
    )
    pq.write_table(table, folder / "blocks.parquet")
    url = str(tmp_path / "repo")
    ingest(Repository.create(url), str(folder.parent), "blocks")
    return url


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_ranks_with_different_numbers_of_labels_and_some_with_none_learn_what_one_rank_does(launcher, url):
    words = ["--repo", url, "--data", "blocks@1", "--vocabulary", VOCABULARY, "--lr", "1e-2", "--epochs", "2"]
    words += ["--layers", "1", "--heads", "2", "--width", "16", "--context", BLOCK]

    def losses(num_ranks, batch_size):
        done = launcher.run(num_ranks, warm_python.command(), "-c", PROGRAM, *words, "--batch-size", batch_size)
        assert done.returncode == 0, done.stderr
        return [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]

    together, alone = losses(2, 1), losses(1, 2)
    assert together == pytest.approx(alone, abs=0.002)
    assert len(alone) == 2
    assert alone[-1] < alone[0]
