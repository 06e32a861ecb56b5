"""A number of thousands of digits, or near the limit of its type, is refused and stored as nothing else."""

import gzip
import json

import pytest

from datasvc.errors import ConfigError, CorruptDataError, DatasvcError
from datasvc.repository.logs.references import parse_reference
from datasvc.repository.marker import check_marker
from datasvc.shards import ingest, open_dataset
from datasvc.shards.sources.common.listing import expand_braces
from datasvc.sizes import parse_size


@pytest.mark.parametrize("size", [2**63 - 1, 2**63 - 513, 2**63, 2**88])
@pytest.mark.parametrize("suffix", [".tar", ".tar.gz"])
def test_a_tar_that_announces_exabytes_is_damaged(size, suffix, repository, folder):
    """python/cpython#83219, python/cpython#151497: a size ends in an OverflowError or fills memory."""
    header = bytearray(512)
    header[:5], header[100:107], header[156:157], header[257:265] = b"a.jpg", b"0000644", b"0", b"ustar\x0000"
    header[124:136] = (1 << 95 | size).to_bytes(12, "big")
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    raw = bytes(header) + b"x" * 1024
    folder.mkdir(exist_ok=True)
    path = folder / f"x{suffix}"
    path.write_bytes(gzip.compress(raw) if suffix.endswith("gz") else raw)
    with pytest.raises(CorruptDataError, match="is too large"):
        ingest(repository, str(path), "d")


@pytest.mark.parametrize(
    "number",
    ["1" + "0" * 400, "-1" + "0" * 5000, "1" + "0" * 1_000_000, "1" + "0" * 400 + ".5"],
    ids=["400", "-5000", "million", "fraction"],
)
@pytest.mark.parametrize("shape", ["{}", "[0.5, {}]", '{{"b": {}}}'])
def test_a_json_number_beyond_floats_does_not_become_infinity(number, shape, repository, folder):
    """ClickHouse/ClickHouse#110974: a number that no integer type holds becomes a float."""
    folder.mkdir(exist_ok=True)
    first = json.loads(shape.format("1.5"))
    lines = [json.dumps({"a": first}), '{"a": ' + shape.format(number) + "}"]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    report = ingest(repository, str(folder / "a.jsonl"), "d", on_bad="skip")
    assert [sample["a"] for sample in open_dataset(repository, "d")["train"]] == [first]
    assert report.bad


@pytest.mark.parametrize(
    "read",
    [
        lambda digits: parse_reference(f"pets@{digits}"),
        lambda digits: expand_braces(f"a{{0..{digits}}}.tar"),
        lambda digits: parse_size(f"{digits}GB"),
        lambda digits: check_marker(f'{{"format": {digits}}}'.encode(), "x"),
        lambda digits: check_marker(b'{"format": 1e999}', digits[:1]),
    ],
    ids=["reference", "range", "size", "marker", "infinite"],
)
def test_a_number_of_5000_digits_is_an_error_of_ours(read):
    """qutebrowser/qutebrowser#7808: `int` refuses more than 4,300 digits, which the reader did not expect."""
    with pytest.raises(DatasvcError):
        read("9" * 5000)


def test_a_number_with_leading_zeros_is_the_version():
    """qutebrowser/qutebrowser#7808: only the digits of the number itself count."""
    assert parse_reference("pets@" + "0" * 5000 + "12").version == 12
    with pytest.raises(ConfigError, match="has 19 digits"):
        parse_reference("pets@" + "9" * 19)
