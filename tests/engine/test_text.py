"""Text streams: every emission joined is the tokenizer's own text, cut at the stop string."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.engine.text import StoppingFactory
from kvferry.protocol.errors import InvalidRequest
from kvferry.protocol.request import Sampling

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


def cut_after(pieces, stops, min_tokens):
    """As `cut`, but a stop string that is complete within the first `min_tokens` pieces is none."""
    text = "".join(pieces)
    for end in range(len("".join(pieces[:min_tokens])) + 1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], "stop"
    return text, "length"


@given(
    st.lists(st.text(alphabet="ab ", min_size=1, max_size=3), min_size=1, max_size=12),
    st.lists(st.text(alphabet="ab ", min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(0, 14),
)
@relaxed
def test_stop_strings_wait_for_min_tokens(pieces, stops, min_tokens):
    """Tokens that are pieces of text: what begins early and is complete later stops, what is complete early is text.
    And the same when the first tokens were another attempt's.
    """

    class Pieces:
        def push(self, token_id):
            return pieces[token_id]

        def flush(self):
            return ""

    made = StoppingFactory(Pieces, ())
    ids, rules = range(len(pieces)), {"stop": tuple(stops), "min_tokens": min_tokens}
    text, reason, last = run(made, ids, **rules)
    assert (text, reason) == cut_after(pieces, stops, min_tokens)
    for before in range(last + 1):
        first, second = made.stream(Sampling(len(pieces), **rules)), None
        shown = "".join(first.push(i).text for i in range(before))
        second = made.stream(Sampling(len(pieces), **rules), range(before))
        assert shown + "".join(second.push(i).text for i in range(before, last + 1)) == text


def test_eos_is_ignored_if_asked_and_stop_ids_are_not(texts, chat):
    ids = [*chat.encode("one"), 2, *chat.encode(" two"), 504, *chat.encode(" three")]
    at_eos, at_stop = ids.index(2), ids.index(504)
    assert run(texts, ids)[1:] == ("stop", at_eos)
    assert run(texts, ids, ignore_eos=True)[1:] == ("length", len(ids) - 1)
    assert run(texts, ids, ignore_eos=True)[0] == chat.decode(ids)  # a special token has no text
    assert run(texts, ids, ignore_eos=True, stop_token_ids=(504,)) == ("one two", "stop", at_stop)


def test_end_tokens_end_nothing_before_min_tokens(texts, chat):
    """The engine does not draw them there, unless there is nothing else to draw."""
    ids = [2, 2, *chat.encode(" a"), 2]
    assert run(texts, ids, min_tokens=2) == (chat.decode(ids[2:-1]), "stop", len(ids) - 1)
    assert run(texts, ids, min_tokens=1)[1:] == ("stop", 1)


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
