"""Chat data: messages become tokens by the template of a tokenizer's folder, and a mask of what the assistant says.

A folder of Hugging Face has `tokenizer.json`, and a Jinja template in `chat_template.jinja` or as `chat_template` of
`tokenizer_config.json`. The template runs in Jinja's sandbox. The tokens of an assistant's message are found by
rendering the messages before it too, with the prompt of a generation, so the template needs no marks of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from datasvc.errors import BadSampleError, ConfigError, NotFoundError
from datasvc.extras import explain_missing
from datasvc.repository.store.storage import resolve_url
from datasvc.shards.sources.common.files import FileReader
from datasvc.shards.sources.text.tokens import load_tokenizer

_ASSISTANT: Final = "assistant"
_SPECIAL: Final = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """The template and the tokenizer of a folder.

    Args:
        folder: URL of the folder.

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
        text = config.get("chat_template") if template is None else template.decode()
        if not isinstance(text, str):
            raise ConfigError(
                f"{folder} has no chat template; expected chat_template.jinja in it, or a text in its config"
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals["raise_exception"] = _raise
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        self._errors: type[Exception] = TemplateError
        try:
            self._template = environment.from_string(text)
        except TemplateError as error:
            raise ConfigError(f"the chat template of {folder} is not valid: {error}") from error
        special = {name: config.get(name) for name in _SPECIAL}
        self._special = {
            name: token["content"] if isinstance(token, dict) else token for name, token in special.items() if token
        }

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
        if not messages or not all(isinstance(each, Mapping) and "role" in each for each in messages):
            raise BadSampleError(f"messages are {str(messages)[:80]!r}; expected a list of objects with a role")
        text = self._render(messages)
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

    def _render(self, messages: Sequence[Mapping[str, Any]], *, prompt: bool = False) -> str:
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=prompt, **self._special)
        except (self._errors, TypeError, ValueError, KeyError) as error:
            raise BadSampleError(f"the chat template refuses the messages: {error}") from error


def _read(folder: str, name: str) -> bytes | None:
    url = f"{folder.rstrip('/')}/{name}"
    try:
        return FileReader(url).read(resolve_url(url)[1])
    except NotFoundError:
        return None


def _raise(message: str) -> NoReturn:
    raise ValueError(message)
