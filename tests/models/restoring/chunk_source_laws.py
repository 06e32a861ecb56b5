"""What a restore relies on of every source of chunks; each is a subclass of `ChunkSourceLaws` of a few lines."""

import numpy as np
import pytest

from datasvc.errors import CorruptDataError, NotFoundError
from datasvc.models.tensors.chunk_reader import is_near
from datasvc.models.tensors.tensor_table import ChainLink, Chunk, TensorRecord
from datasvc.repository import ObjectInfo
from datasvc.repository.objects.objects import digest_of

CONTENT = np.random.default_rng(0).bytes(5000)
INFO = ObjectInfo(digest_of(CONTENT), len(CONTENT))
MISSING = ObjectInfo(digest_of(b"missing"), 100)
RANGES = ((0, 5000), (0, 1), (17, 300), (4999, 1))


def record_of(info):
    """Return a tensor whose only chunk is a whole object."""
    chunk = Chunk(
        (0,), (info.size_bytes,), info.digest, (ChainLink(info.digest, info.size_bytes, 0, info.size_bytes, "raw"),)
    )
    return TensorRecord("x", "uint8", (info.size_bytes,), (chunk,))


class ChunkSourceLaws:
    """The laws of chunk sources. A subclass gives the fixtures `source` and `objects`, its nearest copy."""

    def damage(self, objects):
        """Change a byte of the source's nearest copy."""
        path = objects.local_path(INFO.digest)
        path.write_bytes(CONTENT[:2000] + bytes([CONTENT[2000] ^ 1]) + CONTENT[2001:])

    def test_a_range_is_exactly_the_bytes_that_were_asked_for(self, source):
        for offset, length in RANGES:
            assert bytes(source.read_range(INFO.digest, offset, length)) == CONTENT[offset : offset + length]

    def test_a_range_is_read_into_memory_of_the_callers(self, source):
        out = bytearray(302)
        if is_near(source):
            source.read_into(INFO.digest, 17, memoryview(out)[1:301])
            assert bytes(out) == b"\0" + CONTENT[17:317] + b"\0"

    def test_a_range_that_the_object_ends_before_is_corrupt(self, source):
        for offset, length in ((0, 5001), (4999, 2), (9000, 4)):
            with pytest.raises(CorruptDataError, match="5000 bytes"):
                source.read_range(INFO.digest, offset, length)

    def test_an_object_that_nobody_has_is_not_found_and_has_no_copies(self, source):
        with pytest.raises(NotFoundError, match=MISSING.digest):
            source.read_range(MISSING.digest, 0, 10)
        assert list(source.copies(MISSING.digest, 0, 10)) == []

    def test_copies_are_whole_and_give_the_same_range(self, source):
        for offset, length in RANGES:
            copies = [bytes(copy) for copy in source.copies(INFO.digest, offset, length)]
            assert copies
            assert set(copies) == {CONTENT[offset : offset + length]}

    def test_a_damaged_copy_is_none(self, source, objects):
        self.damage(objects)
        # Also where the range itself is whole: the object as a whole is not what its digest says.
        for offset, length in ((0, 5000), (0, 10)):
            assert {bytes(copy) for copy in source.copies(INFO.digest, offset, length)} <= {
                CONTENT[offset : offset + length]
            }

    def test_a_location_names_the_object(self, source):
        assert INFO.digest in source.location(INFO.digest)
