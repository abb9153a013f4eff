"""Text streams: every emission joined is the tokenizer's own text, cut at the stop string."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.messages import Sampling

NASTY = "naïve café 🙂👩‍👩‍👧‍👦🏳️‍🌈 東京は日本の首都です。 한국어 \t\r\n  x  ﷽ नमस्ते 1234567 ''\" <|im_end|> ��"
relaxed = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def run(texts, ids, **rules):
    """All emissions' text joined, and the reason; stops at the first finish as a caller must."""
    stream = texts.stream(Sampling(**{"max_tokens": len(ids), **rules}))
    parts = []
    for index, token in enumerate(ids):
        emission = stream.push(token)
        parts.append(emission.text)
        if emission.finish_reason:
            return "".join(parts), emission.finish_reason, index
    return "".join(parts), "", len(ids) - 1


def cut(text, stops):
    """The text up to the stop string that is complete first, found by scanning one character at a time."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], "stop"
    return text, "length"


@given(st.lists(st.integers(3, 49151), min_size=1, max_size=40))
@relaxed
def test_any_tokens_join_to_the_decoded_text(texts, chat, ids):
    assert run(texts, ids)[:2] == (chat.decode(ids), "length")


@given(st.text(alphabet=NASTY, min_size=1, max_size=30))
@relaxed
def test_any_text_comes_back(texts, chat, text):
    ids = [i for i in chat.encode(text) if i not in texts.stream(Sampling(1))._end_ids]
    assert run(texts, ids)[0] == chat.decode(ids)


@given(
    st.lists(st.sampled_from("ab🙂京 "), max_size=25),
    st.lists(st.text(alphabet="ab🙂京 ", min_size=1, max_size=4), min_size=1, max_size=3),
)
@relaxed
def test_stop_strings_cut_as_if_text_came_by_characters(texts, chat, letters, stops):
    ids = chat.encode("".join(letters)) or chat.encode("a")
    expected = cut(chat.decode(ids), stops)
    assert run(texts, ids, stop=tuple(stops))[:2] == expected


@given(st.lists(st.integers(3, 49151), min_size=2, max_size=30), st.data())
@relaxed
def test_stop_strings_out_of_the_middle_of_any_text(texts, chat, ids, data):
    text = chat.decode(ids)
    at = data.draw(st.integers(0, max(len(text) - 1, 0)))
    stop = text[at : at + data.draw(st.integers(1, 6))]
    if stop:
        assert run(texts, ids, stop=(stop,))[:2] == cut(text, [stop])


def test_nothing_that_may_begin_a_stop_string_is_emitted_early(texts, chat):
    stream = texts.stream(Sampling(max_tokens=99, stop=("END",)))
    seen = ""
    for token in chat.encode("so E EN EE ENE EN") + chat.encode("D rest"):
        emission = stream.push(token)
        seen += emission.text
        assert "END" not in seen
        if emission.finish_reason:
            break
    assert (seen, emission.finish_reason) == ("so E EN EE ENE ", "stop")


def test_half_a_character_waits_and_comes_out_at_the_end(texts, chat):
    ids = chat.encode("🏳")
    assert len(ids) > 1
    stream = texts.stream(Sampling(max_tokens=9))
    assert [stream.push(i).text for i in ids] == [""] * (len(ids) - 1) + ["🏳"]
    assert run(texts, ids[:1]) == (chat.decode(ids[:1]), "length", 0)
    assert chat.decode(ids[:1]) == "�"


@pytest.mark.parametrize("end", [2, 504])
def test_an_end_token_has_no_text_and_gives_out_what_was_held(texts, chat, end):
    ids = [*chat.encode("so EN"), end]
    assert run(texts, ids, stop=("END",), stop_token_ids=(504,)) == ("so EN", "stop", len(ids) - 1)


def test_an_end_token_beats_length_and_a_stop_string_does_too(texts, chat):
    assert run(texts, [*chat.encode("a"), 2], max_tokens=2)[1] == "stop"
    ids = chat.encode("one two")
    assert run(texts, ids, stop=("two",)) == ("one ", "stop", len(ids) - 1)


def test_length_ends_at_max_tokens(texts, chat):
    ids = chat.encode("one two three four")
    assert run(texts, ids, max_tokens=2) == (chat.decode(ids[:2]), "length", 1)


def test_special_tokens_have_no_text(texts, chat):
    assert run(texts, [*chat.encode("a"), 1, *chat.encode("b")])[0] == "ab"


def test_a_finished_stream_and_an_empty_stop_string_are_refused(texts):
    stream = texts.stream(Sampling(max_tokens=1))
    stream.push(504)
    with pytest.raises(RuntimeError, match="finished"):
        stream.push(504)
    with pytest.raises(InvalidRequest, match="stop: an empty string"):
        texts.stream(Sampling(max_tokens=1, stop=("",)))
