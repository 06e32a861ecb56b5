"""Reads of the high bytes: the bound of the error holds for any bits, and fewer bytes are read."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from sklearn.datasets import load_digits

from datasvc.errors import ConfigError
from datasvc.models import restore, save
from datasvc.models.restoring.restore import read_version
from datasvc.models.tensors import codec, partial_read
from datasvc.models.tensors.partial_read import PLANES, PartialReader
from datasvc.models.tensors.state_tree import flatten
from datasvc.models.tensors.tensor_table import ChainLink, Chunk, TensorRecord
from datasvc.repository import Digest
from datasvc.repository.objects.objects import Objects
from tests.models.every_kind import flip

FLOATS = {4: np.float32, 8: np.float64}
MANTISSA_BITS = {4: 23, 8: 52}
SMALLEST_NORMAL = {4: 2.0**-126, 8: 2.0**-1022}


class Chain:
    """A chunk whose chain is made link by link, in memory, as a `ChunkSource`."""

    def __init__(self, values):
        self.values, self.objects, self.links = values, {}, []
        self._append("planes", None)

    def change_to(self, values, encoding):
        base, self.values = self.values, values
        self._append(encoding, base.view(np.uint8))

    def _append(self, encoding, base):
        stored = codec.encode(self.values.view(np.uint8), self.values.itemsize, encoding, base)
        digest = Digest(f"{len(self.links):064x}")
        self.objects[digest] = stored
        self.links.append(ChainLink(digest, len(stored), 0, len(stored), encoding))

    def read_range(self, digest, offset, length):
        assert 0 <= offset <= offset + length <= len(self.objects[digest])
        return self.objects[digest][offset : offset + length]

    def read(self, planes):
        """Return the values with reduced precision, None if the chunk must be read whole; and the skipped bytes."""
        shape, dtype = self.values.shape, self.values.dtype.name
        chunk = Chunk((0,), shape, Digest("0" * 64), tuple(self.links))
        out, reader = np.full(self.values.nbytes, 0xAB, np.uint8), PartialReader(self, planes)
        is_filled = reader.read(TensorRecord("w", dtype, shape, (chunk,)), chunk, out)
        return (out.view(self.values.dtype) if is_filled else None), reader.skipped_bytes


@pytest.fixture(autouse=True)
def _small_links(request, monkeypatch):
    if "repository" not in request.fixturenames:
        monkeypatch.setattr(partial_read, "_MIN_LINK_BYTES", 0)


def check_errors(found, values, planes):
    """Check the bounds that `PartialReader.read` states."""
    word = values.itemsize
    bits = MANTISSA_BITS[word] - 8 * (word - planes - (word == 8))
    with np.errstate(all="ignore"):
        found, values = found.astype(np.longdouble), values.astype(np.longdouble)
        is_normal = np.isfinite(values) & (abs(values) >= SMALLEST_NORMAL[word])
        errors = abs(found - values)
        assert np.all(errors[is_normal] < abs(values[is_normal]) * 2.0**-bits)
        is_subnormal = np.isfinite(values) & ~is_normal
        # 2^-132 for a float32 and two planes.
        assert np.all(errors[is_subnormal] < np.longdouble(2) ** (1 - bits) * SMALLEST_NORMAL[word])
        assert np.all(np.isinf(found[np.isinf(values)]))
        assert not np.any(np.isfinite(found[np.isnan(values)]))
        assert np.all(np.signbit(found[is_normal]) == np.signbit(values[is_normal]))


def words(word):
    size = np.uint32 if word == 4 else np.uint64
    sign = 1 << (8 * word - 1)
    infinity = (sign - 1) ^ ((1 << MANTISSA_BITS[word]) - 1)
    edges = [0, 1, 0xFFFF, 0x10000, infinity - 1, infinity, infinity + 1, sign - 1, infinity - 0x10000]
    numbers = st.sampled_from([edge | flag for edge in edges for flag in (0, sign)]) | st.integers(0, 2 * sign - 1)
    return arrays.arrays(size, st.integers(1, 40), elements=numbers)


@given(st.sampled_from([4, 8]).flatmap(words), st.sampled_from(PLANES), st.data())
def test_the_error_of_any_bits_is_bounded(bits, planes, data):
    values = bits.view(FLOATS[bits.itemsize])
    chain = Chain(values)
    found, _ = chain.read(planes)
    check_errors(found, values, planes)
    # Small and large changes of the bits, in chains of XOR and of integer differences.
    for _ in range(data.draw(st.integers(1, 3))):
        changes = arrays.arrays(
            bits.dtype, bits.shape, elements=st.integers(0, 70_000) | st.just(1 << 20) | st.just(0)
        )
        change = data.draw(changes)
        bits = bits + change if data.draw(st.booleans()) else bits - change
        chain.change_to(bits.view(values.dtype), data.draw(st.sampled_from(["xor", "difference"])))
        found, _ = chain.read(planes)
        if found is not None:
            check_errors(found, chain.values, planes)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_chains_of_weights_are_read_in_part_and_zeros_stay_zero(dtype):
    rng = np.random.default_rng(1)
    weights = rng.normal(size=50_000).astype(dtype)
    weights[::7] = 0
    chain = Chain(weights)
    exact = weights.size * weights.itemsize
    for encoding in ("xor", "difference"):
        changed = chain.values * (1 + rng.normal(size=weights.size).astype(dtype) * 1e-4)
        chain.change_to(changed.astype(dtype), encoding)
    found, skipped_bytes = chain.read(2)
    check_errors(found, chain.values, 2)
    assert not found[::7].any()
    assert skipped_bytes > exact * 0.25


def test_a_chain_whose_bound_would_not_hold_is_read_whole():
    chain = Chain(np.array([1.0, 2.0], np.float32))
    chain.change_to(np.array([1.0, 2.0001], np.float32), "difference")
    chain.change_to(np.array([1.0, 2.0002], np.float32), "xor")
    found, skipped_bytes = chain.read(2)
    assert found is None
    assert skipped_bytes < 0
    chain = Chain(np.array([1.0, 2.0], np.float32))
    chain.change_to(np.array([0.0, 2.0001], np.float32), "difference")
    assert chain.read(2)[0] is None


def test_damaged_headers_and_planes_are_read_whole():
    chain = Chain(np.ones(1000, np.float32))
    (digest,) = chain.objects
    whole = chain.objects[digest]
    for place in (0, 3, 9, len(whole) - 1):
        chain.objects[digest] = whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :]
        found, _ = chain.read(2)
        assert found is None or place == len(whole) - 1  # not every damage is found


@pytest.fixture
def trained(repository):
    """A network after some training, and again after some more: as planes, then with differences."""
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    net = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU())
    net.append(torch.nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(net.parameters())
    for step in range(65):
        batch = torch.randint(0, len(images), (64,))
        torch.nn.functional.cross_entropy(net(images[batch]), labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (60, 64):
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "mask": torch.arange(30_000)}
            save(repository, "net", state, step=step)
    return repository


@pytest.mark.parametrize(("ref", "encodings"), [("net@1", {"planes"}), ("net@2", {"planes", "difference"})])
def test_half_of_a_trained_model_is_read(trained, ref, encodings):
    chunks = [chunk for record in read_version(trained, ref).records for chunk in record.chunks]
    assert encodings <= {link.encoding for chunk in chunks for link in chunk.chain}
    whole, partial = restore(trained, ref), restore(trained, ref, planes=2)
    ratio = partial.report.came_bytes["direct"] / whole.report.came_bytes["direct"]
    assert ratio <= 0.55
    exact = flatten(whole.state)[1]
    for name, found in flatten(partial.state)[1].items():
        if found.dtype == torch.float32 and found.numel() > 1:
            check_errors(found.numpy(), exact[name].numpy(), 2)
        else:
            assert torch.equal(found, exact[name])
    assert restore(trained, ref, planes=3).report.came_bytes["direct"] > partial.report.came_bytes["direct"]
    only = restore(trained, ref, only=["model.2"], planes=2).state["model.2.weight"]
    assert torch.equal(only, partial.state["model"]["2.weight"])


def test_damage_that_is_found_is_reported_and_impossible_settings_are_refused(trained):
    (record,) = [record for record in read_version(trained, "net@1").records if record.name == "model.2.weight"]
    flip(trained.storage.local_path(Objects.path(record.chunks[0].chain[0].object)), 3)  # a length in the header
    with pytest.raises(Exception, match=r"model\.2\.weight"):
        restore(trained, "net@1", planes=2)
    for planes in (0, 1, 4, "2"):
        with pytest.raises(ConfigError, match="expected 2 or 3 high bytes"):
            restore(trained, "net@2", planes=planes)
    with pytest.raises(ConfigError, match="cannot be combined with cache="):
        restore(trained, "net@2", planes=2, cache="cache")
    with pytest.raises(ConfigError, match="cannot be combined with into="):
        restore(trained, "net@2", planes=2, into={})
