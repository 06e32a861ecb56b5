"""Chat data: tokens by a template, and a mask of what the assistant says, into packs."""

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import datasvc
from datasvc.errors import BadSampleError, ConfigError, NotFoundError
from datasvc.loaders import TokenLoader
from datasvc.shards.sources.text.chat import ChatTemplate

TEMPLATE = """{{ bos_token }} {% for message in messages %}{% if loop.index > 99 %}{% break %}{% endif %}
{% if message.role not in ["user", "assistant"] %}{{ raise_exception("no role " + message.role) }}{% endif %}
<{{ message.role }}> {{ message.content }} <end>
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
WORDS = ["<bos>", "<user>", "<assistant>", "<end>", "hi", "you", "hello", "there", "bye"]
CHAT = [("user", "hi you"), ("assistant", "hello there"), ("user", "bye"), ("assistant", "bye bye")]


@pytest.fixture
def folder(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<bos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<bos>"}, "chat_template": TEMPLATE}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
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
