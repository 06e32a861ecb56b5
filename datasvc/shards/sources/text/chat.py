"""Chat data: messages become tokens by the template of a tokenizer's folder, and a mask of what the assistant says.

Each line of the source of JSON lines is a conversation, a sample: a document of the packs of `TokenLoader`.

A folder of Hugging Face has `tokenizer.json`, and a Jinja template in `chat_template.jinja` or as `chat_template` of
`tokenizer_config.json`. The template runs in Jinja's sandbox. The tokens of an assistant's message are found by
rendering the messages before it too, with the prompt of a generation, so the template needs no marks of its own.
"""

from __future__ import annotations

import functools
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Final, NoReturn

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from datasvc.errors import BadSampleError, ConfigError, NotFoundError
from datasvc.extras import explain_missing
from datasvc.printable import count_text
from datasvc.repository.objects.objects import Digest, digest_of
from datasvc.repository.store.redaction import redact_url
from datasvc.repository.store.storage import resolve_url
from datasvc.shards.format.schema import KEY
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.common.listing import list_files
from datasvc.shards.sources.common.options import SourceOptions
from datasvc.shards.sources.common.source import BATCH_BYTES, BATCH_SAMPLES, BadSample, FileSource, SourcePart
from datasvc.shards.sources.text.documents import LINES, DocumentRange, check_column, find_surrogate, read_values
from datasvc.shards.sources.text.tokens import TOKENIZER, TOKENS, choose_token_type, load_tokenizer, plan_parts

MESSAGES, COUNTED = "messages", "counted"
_ASSISTANT: Final = "assistant"
_SPECIAL: Final = ("bos_token", "eos_token", "pad_token", "unk_token")
# Besides Jinja's own: a template is a program, and a range that the sandbox refuses is an OverflowError.
_ERRORS: Final = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)


class ChatTemplate:
    """The template and the tokenizer of a folder.

    Args:
        folder: URL of the folder.

    Attributes:
        digest: of the tokenizer, the template and the special tokens: of all that decides the tokens.
        schema: of samples of conversations: `key`, `tokens`, and `counted`, a Boolean for each token.

    Raises:
        ConfigError: the tokenizer or the template is not valid, there is no template, or a package is missing.
        NotFoundError, UnavailableError: the folder cannot be read.
    """

    def __init__(self, folder: str) -> None:
        with explain_missing("chat templates"):
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        content = _read(folder, "tokenizer.json")
        if content is None:
            raise NotFoundError(f"{folder} has no tokenizer.json; give the folder of a Hugging Face tokenizer")
        self._tokenizer = load_tokenizer(content, f"{folder}/tokenizer.json")
        try:
            config = dict(json.loads(_read(folder, "tokenizer_config.json") or b"{}"))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{folder}/tokenizer_config.json is not JSON of an object: {error}") from error
        template = _read(folder, "chat_template.jinja")
        try:
            text = config.get("chat_template") if template is None else template.decode()
        except UnicodeDecodeError as error:
            raise ConfigError(f"{folder}/chat_template.jinja is not UTF-8: {error}; convert it") from error
        if not isinstance(text, str):
            raise ConfigError(
                f"{folder} has no chat template; expected chat_template.jinja in it, or a text in its config"
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        environment.filters["tojson"] = lambda value, **options: json.dumps(
            value, **{"ensure_ascii": False, **options}
        )
        self._errors: type[Exception] = TemplateError
        try:
            self._template = environment.from_string(text)
        except TemplateError as error:
            raise ConfigError(f"the chat template of {folder} is not valid: {error}") from error
        special = {name: config.get(name) for name in _SPECIAL}
        self._special = {
            name: token["content"] if isinstance(token, dict) else token for name, token in special.items() if token
        }
        tokenizer_digest = digest_of(content)
        self.digest: Digest = digest_of(json.dumps([tokenizer_digest, text, self._special]).encode())
        columns = [(KEY, pa.string()), (TOKENS, pa.list_(choose_token_type(self._tokenizer)))]
        fields = [pa.field(name, kind, nullable=False) for name, kind in [*columns, (COUNTED, pa.list_(pa.bool_()))]]
        self.schema = pa.schema(fields, metadata={TOKENIZER: tokenizer_digest.encode()})

    def encode(self, messages: Sequence[Mapping[str, Any]]) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.bool_]]:
        """Return the tokens of a conversation, and which of them the assistant says: `uint32[n]`, `bool[n]`.

        The second is a loss mask: the end of an assistant's turn counts, the start does not. Columns of both make
        chat data of `TokenLoader(loss_mask=)`.

        Args:
            messages: `role` and `content` of each, and what else the template uses.

        Raises:
            BadSampleError: there are no messages, the template refuses them, or changes earlier messages when later
                ones follow, so that those of the assistant are not found.
        """
        if (
            not isinstance(messages, Sequence)
            or not messages
            or not all(isinstance(each, Mapping) and "role" in each for each in messages)
        ):
            raise BadSampleError(f"messages are {str(messages)[:80]!r}; expected a list of objects with a role")
        text = self._render(messages)
        if (error := find_surrogate(text)) is not None:
            raise error
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        starts = np.array([start for start, _ in encoding.offsets], np.int64)
        counted = np.zeros(len(starts), np.bool_)
        for number, message in enumerate(messages):
            if message["role"] == _ASSISTANT:
                before = self._render(messages[:number], prompt=True)
                until = self._render(messages[: number + 1])
                if not (text.startswith(until) and until.startswith(before)):
                    raise BadSampleError(
                        f"the chat template changes message {number} or one before it when others follow, so the "
                        "assistant's tokens are not known; use a template that only appends"
                    )
                counted |= (starts >= len(before)) & (starts < len(until))
        return np.array(encoding.ids, np.uint32), counted

    def ends_turns(self) -> bool:
        """Return whether there is text after what the assistant says, which counts: the end of its turn.

        False for templates that end a turn with the next message: a model that is trained on them does not stop.
        """
        content = "I say so."
        messages = [{"role": "user", "content": "Say so."}, {"role": _ASSISTANT, "content": content}]
        try:
            return not self._render(messages).rstrip().endswith(content)
        except BadSampleError:
            return True  # not known: the template needs other messages

    def _render(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False) -> str:
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=prompt, **self._special)
        except (self._errors, *_ERRORS) as error:
            raise BadSampleError(f"the chat template refuses the messages: {error}") from error


@dataclass(frozen=True, kw_only=True)
class ChatSource(FileSource):
    """A source of JSON lines with a column `messages`; each line is a sample with the key `FILE@OFFSET`.

    Attributes:
        template_url: URL of the folder of the tokenizer and its template.
        template_digest: see `ChatTemplate.digest`.
    """

    kind: ClassVar[str] = "chats"

    template_url: str
    template_digest: Digest

    @classmethod
    def list(cls, url: str, options: SourceOptions | None = None) -> ChatSource:
        """List the source, and load the template. Raises what `FileSource.list` and `ChatTemplate` raise."""
        options = options or SourceOptions()
        if options.chat_template is None:
            raise ConfigError("chats need a chat template; expected the URL of the folder of a tokenizer")
        template = ChatTemplate(options.chat_template)
        if not template.ends_turns():
            warnings.warn(
                f"the chat template in {redact_url(options.chat_template)} writes nothing after an assistant's "
                "message, so the end of a turn is no target, and a model does not learn to stop: let the template "
                "write it there",
                RuntimeWarning,
                stacklevel=2,
            )
        listed = list_files(url)
        files = [file for file in listed if file.extension in LINES]
        if not sum(file.size_bytes for file in files):
            raise NotFoundError(
                f"cannot ingest {redact_url(url)}: no conversations in its {count_text(len(listed), 'file')}; "
                "expected .jsonl"
            )
        check_column(FileReader(url), DocumentRange(files[0].name, files[0].path), MESSAGES)
        return cls(
            url=url,
            schema=template.schema,
            parts=plan_parts(files, options),
            ignored=listed.unused(files),
            template_url=options.chat_template,
            template_digest=template.digest,
        )

    def fingerprint(self) -> Digest:
        """Return a digest of the listing and of what decides the tokens."""
        return self._digest([self.template_digest, [asdict(part) for part in self.parts]])

    def read(self, part: SourcePart) -> Iterator[pa.RecordBatch | BadSample]:
        """Yield the conversations of a part; see `StreamedSource.read`."""
        template = _load_template(self.template_url, self.template_digest)
        samples: list[tuple[str, Any, Any]] = []
        size_bytes = 0
        for piece in part.where["pieces"]:
            for name, messages in read_values(FileReader(self.url), DocumentRange(**piece), MESSAGES):
                try:
                    if isinstance(messages, BadSampleError):
                        raise messages
                    tokens, counted = template.encode(messages)
                except BadSampleError as error:
                    yield BadSample(part.split, name, str(error))
                    continue
                sample_bytes = len(name) + tokens.nbytes + counted.nbytes
                if samples and (size_bytes + sample_bytes > BATCH_BYTES or len(samples) == BATCH_SAMPLES):
                    yield self._batch(samples)
                    samples, size_bytes = [], 0
                samples.append((name, tokens, counted))
                size_bytes += sample_bytes
        if samples:
            yield self._batch(samples)

    def _batch(self, samples: Sequence[tuple[str, Any, Any]]) -> pa.RecordBatch:
        columns = zip(*samples, strict=True)
        arrays = [pa.array([*column], field.type) for column, field in zip(columns, self.schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=self.schema)


# Cached, because a worker reads many parts with the same template.
@functools.lru_cache(maxsize=1)
def _load_template(url: str, digest: Digest) -> ChatTemplate:
    """Load the template of the listing. Raise ConfigError if it is another one now."""
    template = ChatTemplate(url)
    if template.digest != digest:
        raise ConfigError(
            f"the chat template in {redact_url(url)} has changed since the source was listed; list it again"
        )
    return template


def _read(folder: str, name: str) -> bytes | None:
    url = f"{folder.rstrip('/')}/{name}"
    try:
        return FileReader(url).read(resolve_url(url)[1])
    except NotFoundError:
        return None


def _raise(message: str) -> NoReturn:
    raise ValueError(message)
