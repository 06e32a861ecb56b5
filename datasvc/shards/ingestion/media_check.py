"""The check of one encoded image or sound before it is stored, for both kinds of sources and for dry runs."""

from __future__ import annotations

from typing import NamedTuple

import pyarrow as pa

from datasvc.shards.audio.audio_file import read_audio_header
from datasvc.shards.format.schema import is_audio
from datasvc.shards.images.header import Reencoding, check_and_reencode


class CheckedMedia(NamedTuple):
    """What a check has found.

    Attributes:
        kind: format, such as "JPEG" or "FLAC".
        measured: values of `added_columns`, in their order.
        encoded: new bytes to store; None: the content is stored.
    """

    kind: str
    measured: tuple[int | float, ...]
    encoded: bytes | None


def check_media(
    field: pa.Field, content: bytes | memoryview, reencoding: Reencoding, *, decode: bool
) -> CheckedMedia:
    """Check an encoded image or sound, and encode an image again if the settings say so.

    Args:
        field: column of the source, for which `is_media` is true.
        content: the complete file.
        reencoding: settings for images.
        decode: whether to decode the file completely.

    Raises:
        BadSampleError: the file is damaged; see `check_and_reencode` and `read_audio_header`.
        MissingPackageError: a sound is checked, and soundfile is not installed.
    """
    if is_audio(field):
        sound = read_audio_header(content, decode=decode)
        return CheckedMedia(sound.kind, (sound.rate, sound.channels, sound.frames, sound.duration), None)
    header, encoded = check_and_reencode(content, reencoding, decode=decode)
    return CheckedMedia(header.kind, (header.width, header.height), encoded)
