"""Headers and checks of encoded sounds, good, damaged and hostile."""

import itertools
import struct
import subprocess
import sys

import numpy as np
import pytest

from datasvc.errors import BadSampleError, MissingPackageError, UnavailableError
from datasvc.shards.audio import audio_file
from datasvc.shards.audio.audio_file import decode_blocks, open_audio, read_audio_header
from tests.support.sounds import FORMATS, decode, encode, noise, wav_header


@pytest.mark.parametrize("extension", FORMATS)
def test_the_header_of_each_format_is_that_of_the_decoded_file(extension):
    content = encode(noise(48_000, 2), 48_000, extension)
    header = read_audio_header(content, decode=True)
    assert (header.kind, header.rate, header.channels) == (FORMATS[extension][0], 48_000, 2)
    assert header.frames == len(decode(content))
    assert header.duration == header.frames / 48_000


@pytest.mark.parametrize("copied_bytes", [0, 1 << 30])
@pytest.mark.parametrize(("extension", "rate"), [*((each, 48_000) for each in FORMATS), ("mp3", 8_000)])
def test_a_part_equals_that_of_the_whole_file(monkeypatch, extension, rate, copied_bytes):
    monkeypatch.setattr(audio_file, "_COPIED_BYTES", copied_bytes)
    content = encode(noise(240_000, 2), rate, extension)
    whole = decode(content)
    for start in range(12_345, 160_000, 12_347):
        with open_audio(np.frombuffer(content, np.uint8)) as file:
            part = np.concatenate([block.copy() for block in decode_blocks(file, start, 70_000)])
        # After a seek, decoders of MP3 and Opus have other rounding errors in the last bit.
        exact = extension not in ("mp3", "opus")
        np.testing.assert_allclose(part, whole[start : start + 70_000], rtol=0, atol=0 if exact else 1e-6)


def test_a_part_of_an_uncompressed_file_is_read_alone():
    content = np.frombuffer(encode(noise(1_000_000)), np.uint8)
    reads = []
    with open_audio(content, lambda view, _: reads.append(len(view)) or view) as file:
        assert len(next(decode_blocks(file, 500_000, 1_000))) == 1_000
    assert sum(reads) < 20_000


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (b"plain text, no sound", "unknown format"),
        (b"\0\0\0 ftypM4A \0\0\0\0", r"MPEG-4 \(AAC\); expected WAV"),
        (b"ID3001 of a patient", "unknown format"),  # bytes in a table
        (b"\0\0\0\x14MThd" + bytes(50), "unknown format"),
        (wav_header(0), "no frames"),
        (encode(noise(1_000))[:-500], "truncated: 2,000 bytes of samples announced, 1,500 found"),
        (encode(noise(1_000), extension="aiff")[:-500], "truncated: 2,008 bytes of samples announced, 1,508 found"),
        (encode(noise(1_000), extension="au")[:-500], "truncated: 2,000 bytes of samples announced, 1,500 found"),
        (encode(noise(1_000))[:40], "cannot be decoded"),
        (encode(noise(48_000), extension="flac")[:-20_000], "cannot be decoded|truncated"),
        (encode(noise(48_000), extension="mp3")[:10_000], "cannot be decoded|truncated"),
        (encode(noise(48_000), extension="ogg")[:10_000], "truncated"),
        (wav_header(2_000, rate=2_000_000_000) + bytes(2_000), "rate of 2000000000 Hz"),
        (wav_header(2_000, channels=1_000) + bytes(2_000), "1000 channels"),
    ],
)
def test_a_bad_file_is_refused_with_the_reason(content, reason):
    with pytest.raises(BadSampleError, match=reason):
        read_audio_header(content)


def test_a_hole_in_an_ogg_file_is_found():
    content = bytearray(encode(noise(48_000), extension="ogg"))
    content[8_000:16_000] = bytes(8_000)
    with pytest.raises(BadSampleError, match=r"no Ogg page begins|truncated"):
        read_audio_header(bytes(content))


def test_samples_that_are_not_finite_are_found_by_the_complete_check():
    samples = noise(1_000)
    samples[500] = np.nan
    content = encode(samples, subtype="FLOAT")
    read_audio_header(content)
    with pytest.raises(BadSampleError, match="not finite"):
        read_audio_header(content, decode=True)


@pytest.mark.parametrize("size", [0xFFFFFFFF, 0x7FFFFFFF])
def test_a_wav_file_that_was_written_to_a_pipe_has_all_its_frames(size):
    assert read_audio_header(wav_header(size) + bytes(2_000)).frames == 1_000


def long_flac(num_frames):
    """Return a FLAC file of three seconds whose header announces `num_frames`."""
    content = bytearray(encode(noise(48_000), extension="flac"))
    streaminfo = int.from_bytes(content[18:26], "big")
    content[18:26] = (streaminfo >> 36 << 36 | num_frames).to_bytes(8, "big")
    return bytes(content)


def long_rf64():
    """Return an RF64 file of 30 kB whose header announces 10 GiB."""
    sizes = struct.pack("<IQQQI", 28, 10 << 30, 10 << 30, 5 << 30, 0)
    start = wav_header(0xFFFFFFFF)
    return b"RF64" + start[4:12] + b"ds64" + sizes + start[12:] + bytes(30_000)


def test_more_samples_than_a_sound_may_have_are_refused():
    with pytest.raises(BadSampleError, match="5,000,000,000 frames of 1 channels; expected fewer"):
        read_audio_header(long_flac(5_000_000_000))


def test_a_file_that_lies_about_its_length_is_refused_within_small_memory(tmp_path):
    files = [long_flac(5_000_000_000), long_flac(2_000_000_000), long_rf64(), wav_header(0x70000000) + bytes(30_000)]
    for number, content in enumerate(files):
        (tmp_path / str(number)).write_bytes(content)
    program = f"""
import resource
from pathlib import Path
from datasvc.errors import BadSampleError
from datasvc.shards.audio.audio_file import read_audio_header
read_audio_header(Path({str(tmp_path / "good")!r}).read_bytes())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for number in range({len(files)}):
    for decode in (False, True):
        try:
            read_audio_header(Path({str(tmp_path)!r}, str(number)).read_bytes(), decode=decode)
        except BadSampleError:
            continue
        raise AssertionError(number)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    (tmp_path / "good").write_bytes(encode(noise(1_000)))
    grown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(grown.stdout) < 50_000  # kB


def test_without_soundfile_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(MissingPackageError, match=r"soundfile.*pip install .*\[audio\]"):
        read_audio_header(wav_header(2_000) + bytes(2_000))


@pytest.mark.parametrize("extension", ["aiff", "au"])
def test_complete_files_of_other_chunks_are_accepted(extension):
    assert read_audio_header(encode(noise(1_001), extension=extension)).frames == 1_001


@pytest.mark.parametrize("first_failure", [0, 2, 5])
@pytest.mark.parametrize("copied_bytes", [0, 1 << 30])
def test_an_error_of_the_store_is_not_taken_for_a_damaged_file(monkeypatch, copied_bytes, first_failure):
    """libsndfile reads through C, where the exception of a read would be lost."""
    monkeypatch.setattr(audio_file, "_COPIED_BYTES", copied_bytes)

    reads = itertools.count()

    def fail(view, buffer):
        if next(reads) >= first_failure or len(view) > 7_000:
            raise UnavailableError("the disk cannot be read")
        return view

    with pytest.raises(UnavailableError), open_audio(np.frombuffer(encode(noise(9_000)), np.uint8), fail) as file:
        if sum(map(len, decode_blocks(file, 0, 9_000))) < 9_000:
            raise BadSampleError("is truncated")
