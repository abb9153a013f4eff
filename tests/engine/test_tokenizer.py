"""Chat templates and plain text to ids; bad messages are named."""

import pytest

from kvferry.engine.tokenizer import ChatTokenizer
from kvferry.protocol.errors import InvalidRequest


def test_render_follows_the_models_own_template(chat):
    ids = chat.render([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}])
    assert ids == chat.encode(
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == 1


def test_a_system_message_replaces_the_default_one(chat):
    ids = chat.render([{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}])
    assert ids == chat.encode(
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("text", ["a", "  two  spaces", "東京 🙂", "def f(x):\n\treturn x\r\n"])
def test_decode_undoes_encode(chat, text):
    assert chat.decode(chat.encode(text)) == text


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": "x"}, {"role": 3, "content": "x"}], "messages[1].role"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
    ],
)
def test_bad_messages_are_refused_by_name(chat, messages, param):
    with pytest.raises(InvalidRequest) as caught:
        chat.render(messages)
    assert caught.value.param == param
    assert param in str(caught.value)


def test_what_a_template_refuses_is_the_requests_fault(loaded, monkeypatch):
    template = "{% if messages[0].role != 'user' %}{{ raise_exception('must start with user') }}{% endif %}"
    monkeypatch.setattr(loaded.tokenizer, "chat_template", template)
    with pytest.raises(InvalidRequest, match="must start with user"):
        ChatTokenizer(loaded.tokenizer).render([{"role": "system", "content": "x"}])
    monkeypatch.setattr(loaded.tokenizer, "chat_template", None)
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTokenizer(loaded.tokenizer).render([{"role": "user", "content": "x"}])


def test_lone_surrogates_in_plain_text_are_refused(chat):
    with pytest.raises(InvalidRequest, match="lone surrogate at character 1"):
        chat.encode("a\udc00")
