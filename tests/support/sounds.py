"""Generated sounds: encoded files, and data sets of them."""

import io
import struct

import numpy as np
import soundfile

from datasvc.shards import ingest, open_dataset

# Extension -> format and subtype of soundfile.
FORMATS = {
    "wav": ("WAV", "PCM_16"),
    "flac": ("FLAC", "PCM_16"),
    "mp3": ("MP3", None),
    "ogg": ("OGG", "VORBIS"),
    "opus": ("OGG", "OPUS"),
}


def noise(frames, channels=1, seed=0):
    """Return `float32[frames, channels]`."""
    return np.random.default_rng(seed).uniform(-0.5, 0.5, (frames, channels)).astype(np.float32)


def encode(samples, rate=16_000, extension="wav", subtype=None):
    """Return an encoded file."""
    out = io.BytesIO()
    kind, default = FORMATS.get(extension, (extension.upper(), "PCM_16"))
    soundfile.write(out, samples, rate, format=kind, subtype=subtype or default)
    return out.getvalue()


def decode(content):
    """Return the whole file as soundfile decodes it, `float32[frames, channels]`."""
    return soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)[0]


def wav_header(num_bytes, *, rate=16_000, channels=1):
    """Return the header of a WAV file of 16 bits that announces `num_bytes` of samples."""
    fields = struct.pack("<IHHIIHH", 16, 1, channels, rate, rate * channels * 2 % 2**32, channels * 2, 16)
    return b"RIFF" + struct.pack("<I", 36) + b"WAVEfmt " + fields + b"data" + struct.pack("<I", num_bytes)


def write_files(folder, files):
    """Write files by their path below `folder`, and return it."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def ingest_files(repository, folder, files, name="sounds", split="train", **options):
    """Ingest files by their path below `folder`; return the split, with samples in the order of their keys."""
    ingest(repository, str(write_files(folder, files)), name, **{"keep_order": True, **options})
    return open_dataset(repository, name)[split]
