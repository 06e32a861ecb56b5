"""Images and image folders that tests make."""

import io
import tarfile

from datasvc.testing import encode_jpeg as jpeg


def write_folder(folder, counts, *, start=0):
    """Write `counts[split][class]` images of growing sizes as an image folder; returns it."""
    number = start
    for split, classes in counts.items():
        for name, count in classes.items():
            target = folder / split / name
            target.mkdir(parents=True, exist_ok=True)
            for _ in range(count):
                width, height = 32 + number % 17, 24 + number % 13
                (target / f"{number:05d}.jpg").write_bytes(jpeg(width, height, seed=number))
                number += 1
    return folder


def write_tars(folder, contents, *, per_tar):
    """Write files, given by name and in order, as tars named `train-000000.tar`, ...; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    names = list(contents)
    for number, start in enumerate(range(0, len(names), per_tar)):
        with tarfile.open(folder / f"train-{number:06d}.tar", "w") as packed:
            for name in names[start : start + per_tar]:
                member = tarfile.TarInfo(name)
                member.size = len(contents[name])
                packed.addfile(member, io.BytesIO(contents[name]))
    return folder


def class_sorted(num_samples, num_classes, **options):
    """Return the files of a WebDataset whose classes come one after the other."""
    files = {}
    for number in range(num_samples):
        files[f"{number:05d}.jpg"] = jpeg(32 + number % 17, 24 + number % 13, seed=number, **options)
        files[f"{number:05d}.cls"] = str(number * num_classes // num_samples).encode()
    return files
