"""A training job as tests see it: a process that takes a batch when it is told to, and says what it got.

    python job.py REPOSITORY '{"decode_group": {"name": ...}, "split": "train", ...}'

Commands come as lines of JSON, and each is answered by one.
"""

import hashlib
import json
import sys
import warnings

from datasvc.loaders import DecodeConfig, ImageLoader
from datasvc.loaders.decode_sharing import DecodeGroup
from datasvc.repository import Repository
from datasvc.shards import open_dataset

OPTIONS = {"batch_size": 8, "training": True, "size": 32, "pixels": "uint8", "decode": DecodeConfig(num_threads=1)}


def describe(batch):
    """Return what identifies a batch to the last bit."""
    content = hashlib.sha256()
    for array in (batch.images, batch.labels, batch.mask, batch.positions):
        content.update(bytes(memoryview(array).cast("B")) if len(array) else b"")
    return [batch.epoch, batch.positions.tolist(), content.hexdigest()]


def endless(loader):
    while True:
        yield from loader.numpy()


def main():
    """Take commands until they end."""
    warnings.simplefilter("ignore")
    options = json.loads(sys.argv[2])
    group = DecodeGroup(**options.pop("decode_group"))
    split = open_dataset(Repository.open(sys.argv[1]), "digits@1")[options.pop("split", "val")]
    loader = ImageLoader(split, decode_group=group, **{**OPTIONS, **options})
    batches = endless(loader)
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        if command == "take":
            answer = [describe(next(batches)) for _ in range(*arguments)]
        elif command == "counts":
            answer = vars(loader.sharing.counts)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    loader.close()


if __name__ == "__main__":
    main()
