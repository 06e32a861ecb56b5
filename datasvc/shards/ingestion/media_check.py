"""The check of one encoded image, sound or video before it is stored, for both kinds of sources and for dry runs."""

from __future__ import annotations

from typing import Any, NamedTuple

import pyarrow as pa

from datasvc.shards.audio.audio_file import read_audio_header
from datasvc.shards.format.schema import is_audio, is_video
from datasvc.shards.images.header import Reencoding, check_and_reencode
from datasvc.shards.video.video_file import read_video_header


class CheckedMedia(NamedTuple):
    """What a check has found.

    Attributes:
        kind: format, such as "JPEG" or "FLAC".
        measured: values of `added_columns`, in their order.
        encoded: new bytes to store; None: the content is stored.
    """

    kind: str
    measured: tuple[Any, ...]
    encoded: bytes | None


def check_media(
    field: pa.Field, content: bytes | memoryview, reencoding: Reencoding, *, decode: bool
) -> CheckedMedia:
    """Check an encoded image, sound or video, and encode an image again if the settings say so.

    Args:
        field: column of the source, for which `is_media` is true.
        content: the complete file.
        reencoding: settings for images.
        decode: whether to decode the file completely.

    Raises:
        BadSampleError: the file is damaged; see `check_and_reencode`, `read_audio_header` and `read_video_header`.
        MissingPackageError: a sound is checked, and soundfile is not installed; or a video, and PyAV is not.
    """
    if is_audio(field):
        sound = read_audio_header(content, decode=decode)
        return CheckedMedia(sound.kind, (sound.rate, sound.channels, sound.frames, sound.duration), None)
    if is_video(field):
        video = read_video_header(content, decode=decode)
        return CheckedMedia(video.codec, video.measured, None)
    header, encoded = check_and_reencode(content, reencoding, decode=decode)
    return CheckedMedia(header.kind, (header.width, header.height), encoded)
