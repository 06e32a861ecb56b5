"""Text to token blocks, with a real tokenizer that is trained here."""

import gzip
import json
import pickle
from itertools import pairwise

import fsspec
import numpy as np
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from datasvc.errors import ConfigError, NotFoundError
from datasvc.repository.objects.objects import digest_of
from datasvc.shards.sources import BadSample, SourceOptions
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.listing import list_files
from datasvc.shards.sources.text.documents import DocumentRange, plan_pieces, read_documents
from datasvc.shards.sources.text.token_blocks import BlockPacker
from datasvc.shards.sources.text.tokens import TOKENIZER, TokenSource, end_of_text
from tests.shards.sources import reading
from tests.shards.sources.source_laws import StreamedSourceLaws

TEXTS = ["the cat sat on the mat", "a dog", "où est le chat ? 猫", "the end of the story\n\nand of the line"] * 8


def train(path, *, special=("<|endoftext|>",), words=(), template=False):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=list(special), initial_alphabet=alphabet)
    tokenizer.train_from_iterator(TEXTS, trainer)
    if words:
        tokenizer.add_tokens(list(words))
    if template:
        number = tokenizer.token_to_id(special[0])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{special[0]} $A {special[0]}", special_tokens=[(special[0], number)]
        )
        tokenizer.enable_truncation(4)
        tokenizer.enable_padding(length=16)
    tokenizer.save(str(path))
    return Tokenizer.from_file(str(path))


@pytest.fixture(scope="module")
def tokenizer_url(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train(path)
    return str(path)


def read_all(source):
    """Return batches and bad samples of all parts."""
    table, bad = reading.read_all(source)
    return table.to_batches(), bad


def unpack(batches):
    """Return the documents that blocks hold, split where one starts."""
    tokens, starts, at = [], [], 0
    for batch in batches:
        for block in batch.to_pylist():
            starts += [at + start for start in block["document_starts"]]
            tokens += block["tokens"][: block["length"]]
            at += block["length"]
    return [tokens[begin:stop] for begin, stop in zip(starts, [*starts[1:], len(tokens)], strict=True)]


def write_lines(path, texts, column="text"):
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))


def expected(tokenizer_url, texts, end=True):
    tokenizer = Tokenizer.from_file(tokenizer_url)
    tail = [end_of_text(tokenizer)] if end else []
    return [tokenizer.encode(text, add_special_tokens=False).ids + tail for text in texts]


class TestTokenSource(StreamedSourceLaws):
    """Documents and not samples are what a file has; blocks are keyed by file."""

    source = TokenSource
    key = None
    is_cut_noticed = False  # the last line of a text may end anywhere

    @pytest.fixture(autouse=True)
    def with_tokenizer(self, tokenizer_url):
        self.options = {"tokenizer": tokenizer_url, "block_tokens": 16}

    def write(self, folder, numbers):
        write_lines(folder / "a.jsonl", [f"document {number}" for number in numbers])

    def numbers(self, table):
        tokenizer = Tokenizer.from_file(self.options["tokenizer"])
        documents = [tokenizer.decode(tokens) for tokens in unpack(table.to_batches())] if table.num_rows else []
        return [int(document.removeprefix("document ")) for document in documents]

    def num_samples(self, source):
        return reading.read_all(source)[0].num_rows


def test_blocks_hold_the_encoded_documents_end_to_end_and_say_where_each_starts(tmp_path, tokenizer_url):
    write_lines(tmp_path / "train.jsonl", TEXTS)
    source = TokenSource.list(str(tmp_path), SourceOptions(tokenizer=tokenizer_url, block_tokens=16))
    batches, bad = read_all(source)
    assert not bad
    assert unpack(batches) == expected(tokenizer_url, TEXTS)
    blocks = [block for batch in batches for block in batch.to_pylist()]
    assert [block["key"] for block in blocks] == [f"train.jsonl#{number}" for number in range(len(blocks))]
    assert all(block["length"] == 16 for block in blocks[:-1])
    assert 0 < blocks[-1]["length"] < 16
    padding = end_of_text(Tokenizer.from_file(tokenizer_url))
    assert set(blocks[-1]["tokens"][blocks[-1]["length"] :]) == {padding}
    for batch in batches:
        batch.validate(full=True)
        assert batch.schema.equals(source.schema, check_metadata=True)


def test_the_schema_and_the_fingerprint_name_the_tokenizer(tmp_path, tokenizer_url):
    write_lines(tmp_path / "a.jsonl", TEXTS)
    other = tmp_path / "other.json"
    train(other, words=["zebra"])
    options = SourceOptions(tokenizer=tokenizer_url)
    source = TokenSource.list(str(tmp_path / "a.jsonl"), options)
    again = TokenSource.list(str(tmp_path / "a.jsonl"), options)
    changed = TokenSource.list(str(tmp_path / "a.jsonl"), SourceOptions(tokenizer=str(other)))
    smaller = TokenSource.list(str(tmp_path / "a.jsonl"), SourceOptions(tokenizer=tokenizer_url, block_tokens=512))
    with open(tokenizer_url, "rb") as opened:
        assert source.schema.metadata[TOKENIZER].decode() == digest_of(opened.read())
    assert source.fingerprint() == again.fingerprint()
    assert len({source.fingerprint(), changed.fingerprint(), smaller.fingerprint()}) == 3


def test_a_document_longer_than_a_block_continues_in_the_next_without_a_start(tmp_path, tokenizer_url):
    (tmp_path / "one.txt").write_text("the cat sat on the mat " * 10)
    source = TokenSource.list(str(tmp_path), SourceOptions(tokenizer=tokenizer_url, block_tokens=8))
    batches, _ = read_all(source)
    blocks = [block for batch in batches for block in batch.to_pylist()]
    assert len(blocks) > 2
    assert [block["document_starts"] for block in blocks] == [[0]] + [[]] * (len(blocks) - 1)


def test_batches_of_blocks_are_bounded_however_short_the_documents_are(tmp_path, tokenizer_url, monkeypatch):
    for module in ("datasvc.shards.sources.text.tokens", "datasvc.testing.source_check"):
        monkeypatch.setattr(f"{module}.BATCH_BYTES", 4096)
    write_lines(tmp_path / "a.jsonl", ["a"] * 2000)
    batches, _ = read_all(TokenSource.list(str(tmp_path), SourceOptions(tokenizer=tokenizer_url, block_tokens=16)))
    assert len(unpack(batches)) == 2000
    assert max(batch.num_rows for batch in batches) > 1
    keys = [key for batch in batches for key in batch.column("key").to_pylist()]
    assert keys == [f"a.jsonl#{number}" for number in range(len(keys))]


def test_each_text_file_is_one_document_and_files_of_a_split_are_packed_together(tmp_path, tokenizer_url):
    for split, texts in (("train", TEXTS[:3]), ("val", TEXTS[3:5])):
        (tmp_path / split).mkdir()
        for number, text in enumerate(texts):
            (tmp_path / split / f"{number}.txt").write_text(text)
    (tmp_path / "notes.pdf").write_bytes(b"%PDF")
    source = TokenSource.list(str(tmp_path), SourceOptions(tokenizer=tokenizer_url, block_tokens=16))
    assert [(part.split, len(part.where["pieces"])) for part in source.parts] == [("train", 3), ("val", 2)]
    assert source.ignored == {".pdf": 1}
    train_blocks = list(source.read(source.parts[0]))
    assert unpack(train_blocks) == expected(tokenizer_url, TEXTS[:3])


def test_truncation_padding_and_template_of_the_tokenizer_neither_cut_nor_add(tmp_path):
    tokenizer = train(tmp_path / "tokenizer.json", template=True)
    assert len(tokenizer.encode(TEXTS[0]).ids) == 16, "the tokenizer itself would cut and pad"
    write_lines(tmp_path / "a.jsonl", TEXTS[:4])
    options = SourceOptions(tokenizer=str(tmp_path / "tokenizer.json"), block_tokens=16)
    batches, _ = read_all(TokenSource.list(str(tmp_path / "a.jsonl"), options))
    plain = train(tmp_path / "plain.json")
    end = plain.token_to_id("<|endoftext|>")
    assert unpack(batches) == [[*plain.encode(text, add_special_tokens=False).ids, end] for text in TEXTS[:4]]
    assert tokenizer.decode(unpack(batches)[0]) == TEXTS[0]


def test_without_an_end_token_documents_are_not_separated_and_zeros_pad(tmp_path):
    train(tmp_path / "tokenizer.json", special=["[PAD]", "<custom>"])
    write_lines(tmp_path / "a.jsonl", TEXTS[:4])
    options = SourceOptions(tokenizer=str(tmp_path / "tokenizer.json"), block_tokens=64)
    batches, _ = read_all(TokenSource.list(str(tmp_path / "a.jsonl"), options))
    assert unpack(batches) == expected(str(tmp_path / "tokenizer.json"), TEXTS[:4], end=False)
    last = batches[-1].to_pylist()[-1]
    assert set(last["tokens"][last["length"] :]) == {0}


@pytest.mark.parametrize("name", ["</s>", "<eos>", "[SEP]"])
def test_the_usual_names_of_the_end_token_are_known(tmp_path, name):
    tokenizer = train(tmp_path / "tokenizer.json", special=["[PAD]", name])
    assert end_of_text(tokenizer) == tokenizer.token_to_id(name) == 1


@pytest.mark.slow
def test_a_large_vocabulary_takes_four_bytes_a_token(tmp_path):
    train(tmp_path / "small.json")
    train(tmp_path / "large.json", words=[f"word{number}" for number in range(1 << 16)])
    write_lines(tmp_path / "a.jsonl", ["word65535 the cat"])
    types = {}
    for name in ("small", "large"):
        options = SourceOptions(tokenizer=str(tmp_path / f"{name}.json"), block_tokens=16)
        source = TokenSource.list(str(tmp_path / "a.jsonl"), options)
        batches, _ = read_all(source)
        types[name] = str(source.schema.field("tokens").type.value_type)
    assert types == {"small": "uint16", "large": "uint32"}
    tokens = [token for batch in batches for token in batch.column("tokens").flatten().to_pylist()]
    assert max(tokens) > 1 << 16


def test_bad_documents_are_named_and_the_others_kept(tmp_path, tokenizer_url):
    good = json.dumps({"text": "the cat"}).encode()
    lines = [
        good,
        b"{",
        b'{"text": 5}',
        b'["text"]',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b'{"text": ""}',
        b"",
        good,
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    (tmp_path / "c.txt").write_bytes(b"")
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(good * 100)[:-12])
    source = TokenSource.list(str(tmp_path), SourceOptions(tokenizer=tokenizer_url, block_tokens=8))
    batches, bad = read_all(source)
    assert len(unpack(batches)) == 2
    offset = len(good) + 1
    assert bad[0] == BadSample("train", f"a.jsonl@{offset}", bad[0].reason)
    named = [(each.key.partition("@")[0], each.reason.partition(":")[0]) for each in bad]
    assert sorted(named) == sorted([
        ("a.jsonl", "is not JSON"), ("a.jsonl", "has no text in 'text'"),
        ("a.jsonl", "is a JSON list; expected an object with 'text'"),
        ("a.jsonl", "is not JSON"), ("a.jsonl", "is not Unicode text"), ("a.jsonl", "is empty"),
        ("b.txt", "is not UTF-8"), ("c.txt", "is empty"), ("d.jsonl.gz", "the rest of the file does not decompress"),
    ])  # fmt: skip


@pytest.mark.parametrize(("pack", "name"), [(gzip.compress, "gz"), (zstandard.compress, "zst")])
def test_a_damaged_compressed_file_is_bad_and_the_others_are_kept(tmp_path, tokenizer_url, pack, name):
    noise = " ".join(str(number * number) for number in range(20_000))
    for kind, content in (("txt", noise), ("jsonl", json.dumps({"text": noise}))):
        packed = bytearray(pack(content.encode()))
        packed[len(packed) // 2 : len(packed) // 2 + 40] = b"!" * 40
        (tmp_path / f"a.{kind}.{name}").write_bytes(packed)
    (tmp_path / "b.txt").write_text("the cat")
    source = TokenSource.list(str(tmp_path), SourceOptions(tokenizer=tokenizer_url, block_tokens=8))
    batches, bad = read_all(source)
    assert len(unpack(batches)) == 1
    assert sorted(each.key.partition("@")[0] for each in bad) == [f"a.jsonl.{name}", f"a.txt.{name}"]


def test_a_document_that_is_absurdly_large_is_left_out_with_advice(tmp_path, tokenizer_url, monkeypatch):
    monkeypatch.setattr("datasvc.shards.sources.text.documents.MAX_DOCUMENT_BYTES", 100)
    (tmp_path / "a.txt").write_text("cat " * 26)
    (tmp_path / "b.txt").write_text("cat " * 25)
    source = TokenSource.list(str(tmp_path), SourceOptions(tokenizer=tokenizer_url))
    batches, bad = read_all(source)
    assert [each.key for each in bad] == ["a.txt"]
    assert "one per line of JSON lines" in bad[0].reason
    assert len(unpack(batches)) == 1


def test_missing_files_are_reported_before_a_document_is_read(tmp_path, tokenizer_url):
    write_lines(tmp_path / "a.jsonl", TEXTS, column="content")
    url = str(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match=r"expected the URL of a Hugging Face tokenizer.json"):
        TokenSource.list(url)
    with pytest.raises(ConfigError, match=r"no column 'text'; found \['content'\]"):
        TokenSource.list(url, SourceOptions(tokenizer=tokenizer_url))
    with pytest.raises(NotFoundError, match="it does not exist"):
        TokenSource.list(url, SourceOptions(tokenizer=str(tmp_path / "gone.json"), text="content"))
    with pytest.raises(ConfigError, match=r"is not a valid Hugging Face tokenizer.json"):
        TokenSource.list(url, SourceOptions(tokenizer=url, text="content"))
    with pytest.raises(ConfigError, match="block_tokens is 1"):
        TokenSource.list(url, SourceOptions(tokenizer=tokenizer_url, block_tokens=1))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "a.txt").write_bytes(b"")
    with pytest.raises(NotFoundError, match="no text in its 1 file"):
        TokenSource.list(str(tmp_path / "empty"), SourceOptions(tokenizer=tokenizer_url))


def test_a_tokenizer_that_changes_after_the_listing_is_an_error(tmp_path):
    train(tmp_path / "tokenizer.json")
    (tmp_path / "a.txt").write_text("the cat")
    options = SourceOptions(tokenizer=str(tmp_path / "tokenizer.json"))
    source = TokenSource.list(str(tmp_path / "a.txt"), options)
    train(tmp_path / "tokenizer.json", words=["zebra"])
    with pytest.raises(ConfigError, match="has changed since the source was listed"):
        list(source.read(source.parts[0]))


def test_sources_and_tokenizers_in_memory_are_read_alike(tmp_path, tokenizer_url):
    memory = fsspec.filesystem("memory")
    with open(tokenizer_url, "rb") as opened:
        memory.pipe_file("/tokens-test/tokenizer.json", opened.read())
    write_lines(tmp_path / "a.jsonl", TEXTS)
    memory.pipe_file("/tokens-test/data/a.jsonl.gz", gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    options = SourceOptions(tokenizer="memory://tokens-test/tokenizer.json", block_tokens=32)
    source = pickle.loads(pickle.dumps(TokenSource.list("memory://tokens-test/data", options)))
    batches, bad = read_all(source)
    assert not bad
    assert unpack(batches) == expected(tokenizer_url, TEXTS)


def test_parts_are_ranges_of_large_files_and_groups_of_small_ones(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"x" * 250)
    (tmp_path / "b.jsonl.gz").write_bytes(b"x" * 250)
    (tmp_path / "c.txt").write_bytes(b"x" * 250)
    for number in range(5):
        (tmp_path / f"d{number}.txt").write_bytes(b"x" * 40)
    plan = plan_pieces(list_files(str(tmp_path)), 100)
    assert [[(piece.name, piece.start, piece.stop) for piece in pieces] for pieces, _, _ in plan] == [
        [("a.jsonl", 0, 100)], [("a.jsonl", 100, 200)], [("a.jsonl", 200, None)],
        [("b.jsonl.gz", 0, None)], [("c.txt", 0, None)],
        [("d0.txt", 0, None), ("d1.txt", 0, None)], [("d2.txt", 0, None), ("d3.txt", 0, None)], [("d4.txt", 0, None)],
    ]  # fmt: skip
    assert [size for _, size, _ in plan] == [100, 100, 50, 250, 250, 80, 80, 40]


@given(texts=st.lists(st.text(max_size=20), max_size=12), step=st.integers(1, 60))
def test_ranges_of_a_file_have_each_line_once(tmp_path_factory, texts, step):
    folder = tmp_path_factory.mktemp("ranges")
    write_lines(folder / "a.jsonl", texts)
    reader = FileReader(str(folder / "a.jsonl"))
    plan = plan_pieces(list_files(str(folder / "a.jsonl")), step)
    found = [each for pieces, _, _ in plan for piece in pieces for each in read_documents(reader, piece, "text")]
    assert [text for _, text in found] == texts
    assert len({name for name, _ in found}) == len(found)


@example(lengths=[2, 1], block=2, step=2)  # a document starts where the taken blocks end
@given(
    lengths=st.lists(st.integers(1, 40), max_size=30),
    block=st.integers(2, 17),
    step=st.integers(1, 4),
)
def test_packing_loses_and_repeats_nothing_however_blocks_are_taken(lengths, block, step):
    stops = np.cumsum([0, *lengths])
    documents = [np.arange(begin, stop) for begin, stop in pairwise(stops)]
    packer = BlockPacker(block, np.uint16, padding=65535)
    taken = []
    for document in documents:
        packer.add(document)
        while packer.num_full >= step:
            taken.append(packer.take(step))
    while packer.num_full:
        taken.append(packer.take(min(step, packer.num_full)))
    last = packer.finish()
    taken += [last] if last is not None else []
    tokens = [
        number
        for blocks in taken
        for row, length in zip(blocks.tokens, blocks.lengths, strict=True)
        for number in row[:length]
    ]
    assert tokens == list(range(stops[-1]))
    starts, at = [], 0
    for blocks in taken:
        for index in range(len(blocks.lengths)):
            begin, stop = blocks.start_offsets[index : index + 2]
            starts += (blocks.starts[begin:stop] + at).tolist()
            at += block
    assert starts == stops[:-1].tolist()
    lengths_found = [length for blocks in taken for length in blocks.lengths.tolist()]
    assert all(length == block for length in lengths_found[:-1])
    assert all(np.all(blocks.tokens[-1][blocks.lengths[-1] :] == 65535) for blocks in taken)


def test_a_piece_with_a_start_has_no_line_that_began_before_it(tmp_path):
    write_lines(tmp_path / "a.jsonl", ["one", "two"])
    line = len('{"text": "one"}\n')
    reader = FileReader(str(tmp_path / "a.jsonl"))
    path = str(tmp_path / "a.jsonl")
    names = [
        [text for _, text in read_documents(reader, DocumentRange("a.jsonl", path, start), "text")]
        for start in (0, 1, line, line + 1)
    ]
    assert names == [["one", "two"], ["two"], ["two"], []]
