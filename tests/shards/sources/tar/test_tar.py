import gzip
import io
import tarfile
import tracemalloc

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from datasvc.errors import ConfigError, CorruptDataError
from datasvc.shards.sources.common.files import FileReader, decompress
from datasvc.shards.sources.common.listing import expand_braces, list_files
from datasvc.shards.sources.tar.tar import TarReader, open_tar
from tests.support.fuzzing import counts_refusals

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def tar_of(files, *, form=tarfile.GNU_FORMAT, **options):
    """Return a tar of `files`: (name or TarInfo, content) pairs."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form, **options) as tar:
        for name, content in files:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def special(name, kind, target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def contents(tar, stream=io.BytesIO):
    reader = TarReader(stream(tar), "x.tar")
    return [(member.name, reader.read(member)) for member in reader]


def with_checksum(header):
    header = header[:148] + b" " * 8 + header[156:]
    return header[:148] + b"%06o\0 " % sum(header) + header[156:]


def plain_header(name=b"a.txt", size=b"00000000005\0", kind=b"0"):
    header = bytearray(512)
    header[: len(name)], header[124:136], header[156:157] = name, size, kind
    return with_checksum(bytes(header))


names = st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=60).filter(
    lambda name: name != ".."
)


@given(st.lists(st.tuples(names, st.binary(max_size=3000)), max_size=8), st.sampled_from(["gnu", "pax"]))
def test_members_come_back_with_name_and_content(files, form):
    tar = tar_of(files, form=FORMATS[form], encoding="utf-8")
    assert contents(tar) == files


@pytest.mark.parametrize("form", sorted(FORMATS))
@pytest.mark.parametrize(
    "name", ["d" * 100 + "/" + "e" * 90, "d" * 154 + "/" + "e" * 100, "a" * 100, "/".join("abc" * 40)]
)
def test_names_longer_than_a_header_come_back_in_every_format(name, form):
    tar = tar_of([(name, b"x"), ("b", b"y")], form=FORMATS[form])
    assert contents(tar) == [(name, b"x"), ("b", b"y")]


def test_what_gnus_own_form_keeps_behind_the_name_is_no_part_of_it():
    header = bytearray(plain_header())
    header[257:265], header[345:356] = b"ustar  \0", b"13765432100"
    assert contents(with_checksum(bytes(header)) + b"hello".ljust(512, b"\0") + bytes(1024)) == [("a.txt", b"hello")]


def test_offsets_are_where_the_contents_lie():
    tar = tar_of([("a", b"abc"), ("b" * 200, b"defg"), ("c", b"")])
    found = {
        member.name: tar[member.offset : member.offset + member.size_bytes]
        for member in TarReader(io.BytesIO(tar), "x")
    }
    assert found == {"a": b"abc", "b" * 200: b"defg", "c": b""}


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_folders_are_left_out_and_unread_contents_are_skipped(form):
    files = [
        (special("d" * 150, tarfile.DIRTYPE), b""),
        ("d/a", b"1" * 200_000),
        ("d/b", b"2"),
        ("d/c", b"3" * 70_000),
    ]
    tar = tar_of(files, form=FORMATS[form])
    for stream in (io.BytesIO, lambda raw: gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(raw)))):
        reader = TarReader(stream(tar), "x")
        assert [reader.read(member) if member.name == "d/b" else member.name for member in reader] == [
            "d/a",
            b"2",
            "d/c",
        ]


def test_a_folder_as_the_oldest_tars_write_it_is_left_out():
    tar = plain_header(b"d/", b"0" * 12, b"\0") + plain_header(b"d/a") + b"hello".ljust(512, b"\0") + bytes(1024)
    assert contents(tar) == [("d/a", b"hello")]


def test_a_tar_truncated_anywhere_is_an_error_after_the_members_before_it():
    tar = tar_of([("a", b"a" * 700), ("b" * 150, b"b" * 10), ("c", b"")])
    end = len(tar.rstrip(b"\0"))
    end += -end % 512
    for cut in range(0, end + 1, 64):
        reader, found = TarReader(io.BytesIO(tar[:cut]), "x.tar"), []
        with pytest.raises(CorruptDataError, match=r"x.tar (is empty|is not a tar|ends with).*\(at byte \d+\)"):
            found.extend((member.name, reader.read(member)) for member in reader)
        assert len(found) == (cut >= 512 + 700) + (cut >= 3072 + 10) + (cut >= 4096), cut


def test_a_tar_may_end_with_one_zero_block():
    tar = tar_of([("a", b"abc")])
    assert contents(tar[: 3 * 512]) == [("a", b"abc")]


def test_a_damaged_header_is_an_error_that_says_where():
    tar = bytearray(tar_of([("a", b"abc"), ("b", b"def")]))
    tar[1024 + 3] ^= 1
    reader = TarReader(io.BytesIO(bytes(tar)), "x.tar")
    assert reader.read(next(iter(reader))) == b"abc"
    with pytest.raises(CorruptDataError, match=r"wrong checksum.*at byte 1024"):
        next(iter(reader))


@pytest.mark.parametrize("garbage", [b"\xff\xd8\xff" * 1000, b"hello", b"PK\x03\x04" + bytes(600)])
def test_a_file_that_is_no_tar_is_refused(garbage):
    with pytest.raises(CorruptDataError, match="is not a tar: it starts with"):
        contents(garbage)


def test_concatenated_tars_are_an_error_after_the_first():
    first, second = tar_of([("a", b"1")]), tar_of([("b", b"2")])
    reader, found = TarReader(io.BytesIO(first + second), "x"), []
    with pytest.raises(CorruptDataError, match=rf"has content after its end mark.*\(at byte {len(first)}\)"):
        found.extend(member.name for member in reader)
    assert found == ["a"]


@pytest.mark.parametrize(
    ("info", "says"),
    [
        (special("a", tarfile.SYMTYPE, "/etc/passwd"), "symbolic link"),
        (special("a", tarfile.LNKTYPE, "b"), "hard link"),
        (special("a", tarfile.CHRTYPE), "character device"),
        (special("a", tarfile.BLKTYPE), "block device"),
        (special("a", tarfile.FIFOTYPE), "named pipe"),
        (special("a", b"Z"), "not a regular file"),
        (special("/etc/a", tarfile.REGTYPE), "absolute"),
        (special("../a", tarfile.REGTYPE), "leads out of the tar"),
        (special("b/../../a", tarfile.REGTYPE), "leads out of the tar"),
        (special("b\udcff", tarfile.REGTYPE), "not UTF-8"),
    ],
)
@pytest.mark.parametrize("form", sorted(FORMATS))
def test_what_must_not_be_used_is_named_with_its_problem_and_the_rest_is_read(info, says, form):
    tar = tar_of([(info, b""), ("ok..txt", b"fine")], form=FORMATS[form], encoding="utf-8", errors="surrogateescape")
    bad, good = list(TarReader(io.BytesIO(tar), "x"))
    assert says in bad.problem
    assert (good.name, good.problem, good.size_bytes) == ("ok..txt", None, 4)


def test_a_hard_link_whose_header_repeats_a_size_has_no_content():
    tar = plain_header(b"link", kind=b"1") + plain_header(b"a") + b"hello".ljust(512, b"\0") + bytes(1024)
    reader = TarReader(io.BytesIO(tar), "x")
    assert [member.size_bytes for member in reader] == [0, 5]


def test_old_tars_without_a_magic_and_with_signed_checksums_are_read():
    header = bytearray(plain_header("ä".encode()))
    total = sum(header[:148]) + 8 * 32 + sum(header[156:]) - 256 * 2
    header[148:156] = b"%06o\0 " % total
    assert contents(bytes(header) + b"hello".ljust(512, b"\0") + bytes(1024)) == [("ä", b"hello")]


def test_sparse_files_are_skipped_with_their_maps():
    sparse = bytearray(plain_header(b"hole", kind=b"S"))
    sparse[482] = 1
    first_map, second_map = bytearray(512), bytes(512)
    first_map[504] = 1
    tar = with_checksum(bytes(sparse)) + first_map + second_map + b"hello".ljust(512, b"\0") + tar_of([("a", b"1")])
    hole, after = TarReader(io.BytesIO(tar), "x")
    assert "sparse" in hole.problem
    assert after.name == "a"


def test_sizes_in_pax_headers_and_in_binary_count():
    info = tarfile.TarInfo("a")
    info.pax_headers = {"comment": "a = b\nc"}
    assert contents(tar_of([(info, b"x" * 600), ("b", b"")], form=tarfile.PAX_FORMAT)) == [
        ("a", b"x" * 600),
        ("b", b""),
    ]
    pax = b"10 size=5\n"
    claimed = plain_header(size=b"00000000000\0")
    tar = plain_header(b"x", b"%011o\0" % len(pax), b"x") + pax.ljust(512, b"\0") + claimed
    assert contents(tar + b"hello".ljust(512, b"\0") + bytes(1024)) == [("a.txt", b"hello")]
    binary = plain_header(size=b"\x80" + (5).to_bytes(11, "big"))
    assert contents(binary + b"hello".ljust(512, b"\0") + bytes(1024)) == [("a.txt", b"hello")]


def test_a_global_pax_header_counts_until_it_is_overridden():
    def pax(kind, text):
        return plain_header(b"x", b"%011o\0" % len(text), kind) + text.ljust(512, b"\0")

    tar = pax(b"g", b"12 path=g.a\n") + plain_header(size=b"0" * 12) + plain_header(size=b"0" * 12)
    tar += pax(b"x", b"12 path=x.a\n") + plain_header(size=b"0" * 12) + plain_header(size=b"0" * 12) + bytes(1024)
    assert [name for name, _ in contents(tar)] == ["g.a", "g.a", "x.a", "g.a"]


@pytest.mark.parametrize(
    "header",
    [
        plain_header(size=b"0000000zz05\0"),
        plain_header(size=b"-0000000005\0"),
        plain_header(size=b"\xff" * 12),
        plain_header(size=b"\x80" + b"\xff" * 11),
        plain_header(size=b"00007777777\0", kind=b"x"),
        plain_header(size=b"77777777777\0", kind=b"L"),
        plain_header(kind=b"x") + b"hello",
        plain_header(kind=b"x") + b"9 a=b",
        plain_header(kind=b"x") + b"0 a=b",
        plain_header(kind=b"x", size=b"00000000007\0") + b"99 a=b\n",
        plain_header(kind=b"x", size=b"00000000012\0") + b"10 size=x\n" + bytes(502) + plain_header(),
    ],
)
def test_invalid_headers_are_an_error(header):
    with pytest.raises(CorruptDataError, match=r"has a (damaged header|header of)"):
        contents(header.ljust(1024, b"\0") + bytes(1024))


@counts_refusals(CorruptDataError)
@given(st.data())
def test_random_damage_is_an_error_or_gives_members_and_nothing_else(data):
    tar = bytearray(tar_of([("a", b"abc"), ("b" * 200, b"def"), ("c/d", b"g" * 600)], form=tarfile.PAX_FORMAT))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(tar) - 1))
        tar[place] = data.draw(st.integers(0, 255))
        start = place // 512 * 512
        if data.draw(st.booleans()):  # a header that was changed on purpose
            tar[start : start + 512] = with_checksum(bytes(tar[start : start + 512]))
    assert all(isinstance(name, str) and isinstance(content, bytes) for name, content in contents(bytes(tar)))


def test_a_false_size_allocates_nothing_and_is_a_truncation_error():
    tar = plain_header(size=b"\x80" + (1 << 40).to_bytes(11, "big")) + b"little"
    tracemalloc.start()
    with pytest.raises(CorruptDataError, match="ends within a member of 1099511627776 bytes: it is truncated"):
        contents(tar, lambda raw: io.BufferedReader(io.BytesIO(raw)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 << 20


def test_large_members_are_passed_in_pieces():
    bomb = io.BytesIO(zstandard.compress(tar_of([("bomb", bytes(80 << 20)), ("b", b"2")])))
    tracemalloc.start()
    with decompress(bomb, "zstd") as stream:
        assert not stream.seekable()
        assert [member.name for member in TarReader(stream, "x")] == ["bomb", "b"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 << 20


COMPRESSED = {
    "a.tar": lambda raw: raw,
    "a.tar.gz": gzip.compress,
    "a.tgz": gzip.compress,
    "a.tar.zst": zstandard.compress,
    "misnamed.tar": gzip.compress,
    "misnamed-too.tar": zstandard.compress,
}


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.parametrize("remote", [False, True])
def test_compressed_tars_are_opened_by_what_they_are(name, remote, tmp_path):
    tar = tar_of([("a", b"x" * 300_000), ("b", b"y")])
    url = f"memory://{tmp_path}/{name}" if remote else str(tmp_path / name)
    reader = FileReader(url)
    reader.file_system.pipe_file(reader.root, COMPRESSED[name](tar))
    with open_tar(reader, reader.root) as stream:
        found = TarReader(stream, name)
        assert [found.read(member) for member in found] == [b"x" * 300_000, b"y"]


@pytest.mark.parametrize("name", sorted(COMPRESSED.keys() - {"a.tar"}))
def test_a_compressed_tar_that_is_cut_or_damaged_anywhere_is_an_error(name, tmp_path):
    noise = b"".join(number.to_bytes(4, "big") for number in range(5000))
    packed = COMPRESSED[name](tar_of([("a", noise), ("b", b"y")]))
    cuts = [packed[:-5], packed[: len(packed) // 2], packed[:3]]
    wrong = (
        [] if "zst" in name or "too" in name else [packed[:1000] + b"!!!!" + packed[1004:]]
    )  # no checksum in zstd's
    for damaged in cuts + wrong:
        (tmp_path / name).write_bytes(damaged)
        with (
            pytest.raises(CorruptDataError, match=name),
            open_tar(FileReader(str(tmp_path)), str(tmp_path / name)) as raw,
        ):
            reader = TarReader(raw, name)
            for member in reader:
                reader.read(member)


def test_closing_a_compressed_stream_closes_the_file_below_it(tmp_path):
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(tar_of([("a", b"")])))
    stream = FileReader(str(tmp_path)).open(str(tmp_path / "a.tar.gz"))
    below = stream.raw._wrapped
    stream.close()
    assert below.closed


def test_braces_and_patterns_over_folders_give_each_file_a_name_of_its_own(tmp_path):
    for name in ("train/0.tar", "val/0.tar"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"")
    for url in (f"{tmp_path}/{{train,val}}/0.tar", f"{tmp_path}/[tv]*/0.tar", f"{tmp_path}/*/0.tar"):
        assert [file.name for file in list_files(url)] == ["train/0.tar", "val/0.tar"]
    assert [file.name for file in list_files(f"{tmp_path}/[t]rain/*.tar")] == ["train/0.tar"]


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("a", ["a"]),
        ("{08..10}-{x,y}", ["08-x", "08-y", "09-x", "09-y", "10-x", "10-y"]),
        ("a{1,{2,3}}", ["a1", "a2", "a1", "a3"]),
        ("{}", [""]),
    ],
)
def test_braces_are_expanded_in_order(text, expanded):
    assert expand_braces(text) == expanded


@pytest.mark.parametrize("text", ["{0..99999999999}", "{0..999}" * 4, "{{0..9999},x}{0..999}"])
def test_braces_with_too_many_texts_are_refused_before_they_fill_the_memory(text):
    with pytest.raises(ConfigError, match="use smaller ranges"):
        expand_braces(text)
