"""Chat data: tokens by a template, and a mask of what the assistant says, into packs."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import datasvc
from datasvc.errors import BadSampleError, ConfigError, NotFoundError
from datasvc.loaders import TokenLoader
from datasvc.shards.sources import SourceOptions
from datasvc.shards.sources.text.chat import ChatSource, ChatTemplate
from datasvc.shards.sources.text.tokens import TOKENIZER
from tests.cli.command import run
from tests.shards.sources import reading
from tests.shards.sources.source_laws import StreamedSourceLaws

TEMPLATE = """{{ bos_token }} {% for message in messages %}{% if loop.index > 99 %}{% break %}{% endif %}
{% if message.role not in ["user", "assistant"] %}{{ raise_exception("no role " + message.role) }}{% endif %}
<{{ message.role }}> {{ message.content }} <end>
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
WORDS = ["<bos>", "<user>", "<assistant>", "<end>", "hi", "you", "hello", "there", "bye"]
CHAT = [("user", "hi you"), ("assistant", "hello there"), ("user", "bye"), ("assistant", "bye bye")]


def make_folder(folder, words):
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<bos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": {"content": "<bos>"}, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture
def folder(tmp_path):
    make_folder(tmp_path, WORDS)
    return tmp_path


def chat(pairs):
    return [{"role": role, "content": content} for role, content in pairs]


def test_the_assistants_words_and_the_ends_of_its_turns_count(folder):
    tokens, counted = ChatTemplate(str(folder)).encode(chat(CHAT))
    words = [WORDS[token] for token in tokens]
    assert words[:5] == ["<bos>", "<user>", "hi", "you", "<end>"]
    assert [word for word, flag in zip(words, counted, strict=True) if flag] == [
        "hello",
        "there",
        "<end>",
        "bye",
        "bye",
        "<end>",
    ]
    assert counted.sum() == 6


def test_conversations_are_packed_with_labels_for_the_assistant_only(folder, tmp_path):
    template = ChatTemplate(str(folder))
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    encoded = [template.encode(chat(CHAT[:count])) for count in (2, 4, 2)]
    samples = [{"tokens": tokens, "counted": counted.astype("uint8")} for tokens, counted in encoded]
    repo.datasets.ingest(
        [{name: list(map(int, each)) for name, each in sample.items()} for sample in samples], "chats"
    )
    options = {"pack": "best-fit", "block_tokens": 32, "labels": "within", "loss_mask": "counted", "tail": "short"}
    with TokenLoader(repo.dataset("chats")["train"], batch_size=2, training=True, **options) as loader:
        labels = [WORDS[label] for batch in loader.numpy() for label in batch.labels[batch.labels >= 0].tolist()]
    assert sorted(labels) == sorted(["hello", "there", "<end>"] * 3 + ["bye", "bye", "<end>"])


def test_what_is_no_conversation_and_no_template_is_refused(folder, tmp_path):
    template = ChatTemplate(str(folder))
    for messages, message in (
        ([], "expected a list of objects"),
        ([{"content": "hi"}], "expected a list of objects"),
        (chat([("system", "hi")]), "refuses the messages: no role system"),
    ):
        with pytest.raises(BadSampleError, match=message):
            template.encode(messages)
    # The template of some reasoning models drops what an earlier turn has.
    (folder / "chat_template.jinja").write_text("{% for m in messages[-1:] %}{{ m.content }}{% endfor %}")
    with pytest.raises(BadSampleError, match="use a template that only appends"):
        ChatTemplate(str(folder)).encode(chat(CHAT))
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        ChatTemplate(str(folder))
    (folder / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match="is not valid"):
        ChatTemplate(str(folder))
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text("[")
    with pytest.raises(ConfigError, match="is not JSON"):
        ChatTemplate(str(folder))
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match="has no chat template"):
        ChatTemplate(str(folder))
    with pytest.raises(NotFoundError, match=r"has no tokenizer\.json"):
        ChatTemplate(str(tmp_path / "repo"))


@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}",
        "{% for number in range(10**9) %}x{% endfor %}",
        "{{ 'x' * 10**18 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{% include '/etc/hostname' %}",
        "{{ messages.__class__.__mro__ }}",
    ],
)
def test_a_template_that_fails_makes_bad_samples(folder, template):
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(BadSampleError, match="refuses the messages"):
        ChatTemplate(str(folder)).encode(chat(CHAT))


def test_templates_write_json_as_their_options_ask(folder):
    for options, expected in (
        ("", '"\u00e9"'),
        ("ensure_ascii=False", '"\u00e9"'),
        ("ensure_ascii=True", '"\\u00e9"'),
    ):
        (folder / "chat_template.jinja").write_text(f"{{{{ messages[0].content | tojson({options}) }}}}")
        assert ChatTemplate(str(folder))._render(chat([("user", "\u00e9")])) == expected


def write_chats(path, chats, **more):
    path.write_text("".join(json.dumps({"messages": chat(each), **more}) + "\n" for each in chats))


class TestChatSource(StreamedSourceLaws):
    """Conversations of numbers, which the assistant repeats."""

    source = ChatSource
    key = None
    is_cut_noticed = False  # as a line that is no JSON, which is a bad sample

    @pytest.fixture(autouse=True)
    def with_template(self, tmp_path_factory):
        folder = tmp_path_factory.mktemp("tokenizer")
        self.words = [*WORDS, *map(str, range(100))]
        make_folder(folder, self.words)
        self.options = {"chat_template": str(folder)}

    def write(self, folder, numbers):
        write_chats(folder / "a.jsonl", [[("user", "hi"), ("assistant", str(number))] for number in numbers])

    def numbers(self, table):
        pairs = zip(table["tokens"].to_pylist(), table["counted"].to_pylist(), strict=True)
        counted = [[self.words[token] for token, flag in zip(*pair, strict=True) if flag] for pair in pairs]
        assert all(words[1:] == ["<end>"] for words in counted)
        return [int(words[0]) for words in counted]

    def num_samples(self, source):
        return reading.read_all(source)[0].num_rows


@pytest.mark.slow
def test_files_of_conversations_become_packs_from_the_command_line(folder, tmp_path):
    chats = tmp_path / "chats"
    chats.mkdir()
    write_chats(chats / "train.jsonl", [CHAT[:count] for count in (2, 4, 2)], source="web")
    write_chats(chats / "val.jsonl", [[("system", "hi")], CHAT])
    repo = datasvc.open(str(tmp_path / "repo"), create=True)
    done = run(
        "ingest", chats, "chats", "--chat-template", folder, "--on-bad", "skip", DATASVC_REPO=repo.repository.url
    )
    assert done.returncode == 6, done.stderr
    assert "skipped val/val.jsonl@0: the chat template refuses the messages: no role system" in done.stderr
    splits = repo.dataset("chats")
    assert {name: len(split) for name, split in splits.items()} == {"train": 3, "val": 1}
    options = {"pack": "best-fit", "block_tokens": 32, "labels": "within", "loss_mask": "counted", "tail": "short"}
    with TokenLoader(splits["train"], batch_size=2, training=True, **options) as loader:
        assert loader.tokenizer
        labels = [WORDS[label] for batch in loader.numpy() for label in batch.labels[batch.labels >= 0].tolist()]
    assert sorted(labels) == sorted(["hello", "there", "<end>"] * 3 + ["bye", "bye", "<end>"])


def test_lines_that_are_no_conversations_are_named_and_others_are_read(folder, tmp_path):
    half = chat([("user", "hi \ud800"), ("assistant", "hi")])
    lines = [
        "{",
        json.dumps({"messages": half}),
        *(f'{{"messages": {value}}}' for value in ("3", "{}", '"hi"', "[]")),
    ]
    source = tmp_path / "a.jsonl"
    source.write_text("\n".join([json.dumps({"messages": chat(CHAT)}), *lines, '{"text": "hi"}']))
    listed = ChatSource.list(str(source), SourceOptions(chat_template=str(folder)))
    table, bad = reading.read_all(listed)
    assert table["key"].to_pylist() == ["a.jsonl@0"]
    assert len(bad) == 7
    for each, message in zip(bad, ("JSON", "Unicode", *["list of objects"] * 4, "has no 'messages'"), strict=True):
        assert message in each.reason


def test_another_template_is_another_source(folder, tmp_path):
    write_chats(tmp_path / "a.jsonl", [CHAT])
    first, second = (ChatSource.list(str(tmp_path), SourceOptions(chat_template=str(folder))) for _ in range(2))
    assert first.fingerprint() == second.fingerprint()
    assert first.schema.metadata[TOKENIZER]
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }} <end> {% endfor %}")
    assert (
        ChatSource.list(str(tmp_path), SourceOptions(chat_template=str(folder))).fingerprint() != first.fingerprint()
    )
    with pytest.raises(ConfigError, match="has changed since the source was listed"):
        reading.read_all(first)
    with pytest.raises(ConfigError, match="chats need a chat template"):
        ChatSource.list(str(tmp_path))
