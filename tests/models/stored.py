"""Where a tensor's bytes lie, for tests that damage them."""

from datasvc.models.restoring.restore import read_version
from datasvc.repository import Objects


def object_file(repository, ref, tensor):
    """Return the file of the object that the first chunk of a tensor begins with."""
    (record,) = [each for each in read_version(repository, ref).records if each.name == tensor]
    return repository.storage.local_path(Objects.path(record.chunks[0].chain[0].object))


def flip_last_byte(path):
    """Damage a file, whatever is in it."""
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
