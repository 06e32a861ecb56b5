"""Source of packed token blocks, made from text by a Hugging Face `tokenizer.json`.

A part is a list of text files, or of line ranges of JSON files. Documents are encoded without truncation, padding or
the special tokens of the tokenizer's template. Each document is followed by the end-of-text token, if the tokenizer
has one. The documents of a part are packed into blocks (`token_blocks`); only its last block has padding. The digest
of `tokenizer.json` is part of the schema, because the tokenizer defines the meaning of the tokens.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np
import pyarrow as pa

from datasvc.errors import BadSampleError, ConfigError, NotFoundError
from datasvc.extras import how_to_install
from datasvc.printable import count_text
from datasvc.repository.objects.objects import Digest, digest_of
from datasvc.repository.store.redaction import redact_url
from datasvc.repository.store.storage import resolve_url
from datasvc.shards.format.schema import KEY
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.listing import SourceFile, list_files
from datasvc.shards.sources.common.options import SourceOptions, split_of_file
from datasvc.shards.sources.common.source import BATCH_BYTES, BATCH_SAMPLES, BadSample, FileSource, SourcePart
from datasvc.shards.sources.text.documents import (
    LINES,
    TEXT,
    DocumentRange,
    check_column,
    plan_pieces,
    read_documents,
)
from datasvc.shards.sources.text.token_blocks import BlockPacker, Blocks

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER: Final = b"datasvc.tokenizer"
TOKENS, LENGTH, DOCUMENT_STARTS = "tokens", "length", "document_starts"
# Usual names of the end-of-text token; the first one that the tokenizer has is used.
_ENDS_OF_TEXT: Final = ("<|endoftext|>", "</s>", "<eos>", "[SEP]")
_PART_BYTES: Final = 64 << 20
# One call of the tokenizer encodes about this many characters, or this many documents if that is less.
_BATCH_CHARACTERS: Final = 1 << 20
_BATCH_DOCUMENTS: Final = 256
# Upper bounds of the bytes beside the tokens, to compute how many blocks fit a batch.
_START_BYTES: Final = 4  # per token, because a document may start at every token
_KEY_BYTES: Final = 40  # per block, for the part of its key after the name of the part
_MAX_BLOCK_TOKENS: Final = 1 << 24


@dataclass(frozen=True, kw_only=True)
class TokenSource(FileSource):
    """A source of text files, read as token blocks with the key `PART#BLOCK`.

    Attributes:
        tokenizer_url: URL of `tokenizer.json`.
        tokenizer_digest: digest of its content.
        block_tokens: tokens per block.
        text: column of JSON lines that holds the text.
    """

    kind: ClassVar[str] = "tokens"

    tokenizer_url: str
    tokenizer_digest: Digest
    block_tokens: int
    text: str

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> TokenSource:
        """List the source, and load the tokenizer. For other errors, see `FileSource.list`.

        Raises:
            NotFoundError: there is no text, or no file at the URL of the tokenizer.
            ConfigError: no tokenizer is set, the tokenizer is not valid, or `block_tokens` is out of range.
        """
        options = options or SourceOptions()
        if options.tokenizer is None:
            raise ConfigError("text needs a tokenizer; expected the URL of a Hugging Face tokenizer.json")
        if not 2 <= options.block_tokens <= _MAX_BLOCK_TOKENS:
            raise ConfigError(f"block_tokens is {options.block_tokens}; expected 2 to {_MAX_BLOCK_TOKENS}")
        content = _read_url(options.tokenizer)
        digest = digest_of(content)
        listed = list_files(url)
        files = [file for file in listed if file.extension in (TEXT, *LINES)]
        if not sum(file.size_bytes for file in files):
            raise NotFoundError(
                f"cannot ingest {redact_url(url)}: no text in its {count_text(len(listed), 'file')}; expected "
                ".txt or .jsonl"
            )
        first_json = next((file for file in files if file.extension in LINES), None)
        if first_json is not None:
            check_column(FileReader(url), DocumentRange(first_json.name, first_json.path), options.text)
        parts = plan_parts(files, options)
        schema = _schema(load_tokenizer(content, redact_url(options.tokenizer)), digest, options.block_tokens)
        return cls(
            url=url,
            schema=schema,
            parts=parts,
            ignored=listed.unused(files),
            tokenizer_url=options.tokenizer,
            tokenizer_digest=digest,
            block_tokens=options.block_tokens,
            text=options.text,
        )

    def fingerprint(self) -> Digest:
        """Return a digest of the listing, the tokenizer and the options that change the blocks."""
        parts = [asdict(part) for part in self.parts]
        return self._digest([self.tokenizer_digest, self.block_tokens, self.text, parts])

    def read(self, part: SourcePart) -> Iterator[pa.RecordBatch | BadSample]:
        """Yield the blocks of a part; see `StreamedSource.read`. A `BadSample` is a document that is left out."""
        reader = FileReader(self.url)
        tokenizer = _tokenizer(self.tokenizer_url, self.tokenizer_digest)
        end = end_of_text(tokenizer)
        token_type = self.schema.field(TOKENS).type.value_type
        # Without an end-of-text token, token 0 is the padding. The column `length` tells the padding from tokens.
        packer = BlockPacker(self.block_tokens, token_type.to_pandas_dtype(), end or 0)
        block_bytes = self.block_tokens * (token_type.bit_width // 8 + _START_BYTES) + len(part.name) + _KEY_BYTES
        num_blocks = max(1, min(BATCH_SAMPLES, BATCH_BYTES // block_bytes))
        number = 0  # of the next block, for its key
        for tokens in self._encoded(tokenizer, end, reader, part):
            if isinstance(tokens, BadSample):
                yield tokens
                continue
            packer.add(tokens)
            while packer.num_full >= num_blocks:
                yield self._batch(part, number, packer.take(num_blocks))
                number += num_blocks
        # The last full blocks, and then the tokens that do not fill a block.
        while packer.num_full:
            num_blocks = min(num_blocks, packer.num_full)
            yield self._batch(part, number, packer.take(num_blocks))
            number += num_blocks
        last = packer.finish()
        if last is not None:
            yield self._batch(part, number, last)

    def _encoded(
        self, tokenizer: Tokenizer, end: int | None, reader: FileReader, part: SourcePart
    ) -> Iterator[np.ndarray[Any, Any] | BadSample]:
        """Yield the tokens of each document with the end-of-text token; for an unusable document, a `BadSample`."""
        documents: list[tuple[str, str]] = []
        num_characters = 0
        for piece in part.where["pieces"]:
            for name, text in read_documents(reader, DocumentRange(**piece), self.text):
                if isinstance(text, BadSampleError):
                    yield BadSample(part.split, name, str(text))
                    continue
                documents.append((name, text))
                num_characters += len(text)
                if num_characters >= _BATCH_CHARACTERS or len(documents) >= _BATCH_DOCUMENTS:
                    yield from _encode(tokenizer, end, documents, part.split)
                    documents, num_characters = [], 0
        yield from _encode(tokenizer, end, documents, part.split)

    def _batch(self, part: SourcePart, number: int, blocks: Blocks) -> pa.RecordBatch:
        keys = [f"{part.name}#{number + index}" for index in range(len(blocks.lengths))]
        columns = [
            pa.array(keys, pa.string()),
            pa.FixedSizeListArray.from_arrays(pa.array(blocks.tokens.reshape(-1)), self.block_tokens),
            pa.array(blocks.lengths),
            pa.ListArray.from_arrays(pa.array(blocks.start_offsets), pa.array(blocks.starts)),
        ]
        return pa.RecordBatch.from_arrays(
            [column.cast(field.type) for column, field in zip(columns, self.schema, strict=True)],
            schema=self.schema,
        )


def plan_parts(files: list[SourceFile], options: SourceOptions) -> list[SourcePart]:
    """Return the parts of text files and of files of JSON lines; the samples of each are not counted."""
    # A part has files of one split only, because a block may have documents of several files of its part.
    splits: dict[str, list[SourceFile]] = {}
    for file in files:
        splits.setdefault(split_of_file(file.name, options), []).append(file)
    return [
        _part(split, pieces, size_bytes, stamp)
        for split, split_files in splits.items()
        for pieces, size_bytes, stamp in plan_pieces(split_files, _PART_BYTES)
    ]


def load_tokenizer(content: bytes, location: str) -> Tokenizer:
    """Load a `tokenizer.json` without its truncation and padding. Raise ConfigError, with `location`."""
    # Worker processes already run in parallel, and the tokenizer's own threads can deadlock after a fork.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise ConfigError(
            f"text needs the package tokenizers, which is missing ({error}): {how_to_install('text')}"
        ) from error
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises plain `Exception`
        raise ConfigError(f"{location} is not a valid Hugging Face tokenizer.json: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def end_of_text(tokenizer: Tokenizer) -> int | None:
    """Return the number of the end-of-text token: an added token with a usual name; None if there is none."""
    added = {token.content: number for number, token in tokenizer.get_added_tokens_decoder().items()}
    return next((added[name] for name in _ENDS_OF_TEXT if name in added), None)


def _part(split: str, pieces: list[DocumentRange], size_bytes: int, stamp: str) -> SourcePart:
    """Return a part with the name of its first piece. Its number of blocks is None: it is not known yet."""
    first = pieces[0]
    name = f"{first.name}@{first.start}" if first.start else first.name
    return SourcePart(split, name, size_bytes, None, stamp, {"pieces": [asdict(piece) for piece in pieces]})


def choose_token_type(tokenizer: Tokenizer) -> pa.DataType:
    """Return `uint16` if every token fits, which takes half the space, else `uint32`."""
    largest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    return pa.uint16() if largest <= np.iinfo(np.uint16).max else pa.uint32()


def _schema(tokenizer: Tokenizer, digest: Digest, block_tokens: int) -> pa.Schema:
    fields = [
        pa.field(KEY, pa.string(), nullable=False),
        pa.field(TOKENS, pa.list_(choose_token_type(tokenizer), block_tokens), nullable=False),
        pa.field(LENGTH, pa.int32(), nullable=False),
        pa.field(DOCUMENT_STARTS, pa.list_(pa.int32()), nullable=False),
    ]
    return pa.schema(fields, metadata={TOKENIZER: digest.encode()})


def _encode(
    tokenizer: Tokenizer, end: int | None, documents: list[tuple[str, str]], split: str
) -> Iterator[np.ndarray[Any, Any] | BadSample]:
    """Yield the tokens of each document, or a `BadSample` if it has none. `documents` are pairs of name and text."""
    ending = np.array([] if end is None else [end], np.uint32)
    encodings = tokenizer.encode_batch_fast([text for _, text in documents], add_special_tokens=False)
    for (name, _), encoding in zip(documents, encodings, strict=True):
        if encoding.ids:
            yield np.concatenate([np.array(encoding.ids, np.uint32), ending])
        else:
            yield BadSample(split, name, "is empty: it has no tokens")


def _read_url(url: str) -> bytes:
    return FileReader(url).read(resolve_url(url)[1])


# Cached, because a worker reads many parts with the same tokenizer.
@functools.lru_cache(maxsize=1)
def _tokenizer(url: str, digest: Digest) -> Tokenizer:
    """Load the tokenizer of the listing. Raise ConfigError if its file has another digest now."""
    content = _read_url(url)
    if digest_of(content) != digest:
        raise ConfigError(f"{redact_url(url)} has changed since the source was listed; list the source again")
    return load_tokenizer(content, redact_url(url))
