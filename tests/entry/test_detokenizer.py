"""Incremental text: the same as the whole, however tokens arrive; nothing of a stop string."""

import random

import hypothesis
import hypothesis.strategies as st
import pytest

from jaxserve.entry.detokenizer import Detokenizer, StopAutomaton
from jaxserve.entry.tokenizer import Tokenizer

FAST = hypothesis.settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
TEXT = st.text(
    st.one_of(
        st.characters(codec="utf-8", exclude_characters="▁"),
        st.sampled_from("abc dog 你好 🤗 \n\té"),
    ),
    max_size=60,
)


@pytest.fixture(params=["byte_level", "sentencepiece"])
def tokenizer(request) -> Tokenizer:
    return request.getfixturevalue(request.param)


def chunks(ids: list[int], sizes: list[int]) -> list[list[int]]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(ids[start : start + size])
        start += size
    return [*pieces, ids[start:]]


def read(detokenizer: Detokenizer, pieces: list[list[int]]) -> list[str]:
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.finish()]


@FAST
@hypothesis.given(text=TEXT, sizes=st.lists(st.integers(0, 5), max_size=20))
def test_any_chunking_gives_the_whole_text(tokenizer, text, sizes):
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = read(Detokenizer(tokenizer, []), chunks(ids, sizes))
    assert "".join(pieces) == text == tokenizer.decode(ids)


@FAST
@hypothesis.given(prompt=TEXT, ids=st.data())
def test_text_after_a_prompt_is_the_whole_without_the_prompt(tokenizer, prompt, ids):
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=True)
    generated = ids.draw(st.lists(st.integers(3, tokenizer.vocab_size - 1), max_size=30))
    text = "".join(read(Detokenizer(tokenizer, prompt_ids), [[token] for token in generated]))
    before = tokenizer.decode(prompt_ids)
    whole = tokenizer.decode(prompt_ids + generated)
    assert whole.startswith(before)
    rest = whole[len(before) :]
    # a character that the end leaves incomplete is U+FFFD in the whole and left out here
    assert rest == text or rest == text + "�"


@FAST
@hypothesis.given(ids=st.data())
def test_tokens_one_by_one_equal_tokens_at_once(tokenizer, ids):
    generated = ids.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    one = "".join(read(Detokenizer(tokenizer, []), [[token] for token in generated]))
    assert one == "".join(read(Detokenizer(tokenizer, []), [generated]))


def test_half_a_character_is_never_shown(tokenizer):
    ids = tokenizer.encode("a🎈b", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, [])
    shown = [detokenizer.push([token]) for token in ids]
    assert "".join(shown) == "a🎈b"
    assert "�" not in "".join(shown)
    assert [piece for piece in shown if "🎈" in piece] == ["🎈"]


def test_character_cut_off_at_the_end_is_left_out(byte_level):
    ids = byte_level.encode("a🎈", add_special_tokens=False)
    assert "".join(read(Detokenizer(byte_level, []), [ids[:-1]])) == "a"


@pytest.mark.parametrize("begun", [b"\xed\xa1", b"\xed\xbf", b"\xe0\x80", b"\xf0\x80", b"\xf4\x90"])
def test_bytes_that_can_become_no_character_are_shown_at_once(tokenizer, begun):
    of_byte = {tokenizer.token_bytes(token): token for token in range(3, tokenizer.vocab_size)}
    ids = [of_byte[bytes([byte])] for byte in begun]
    detokenizer = Detokenizer(tokenizer, [])
    assert [detokenizer.push([token]) for token in ids] == ["", "\ufffd\ufffd"]
    assert tokenizer.decode(ids) == "\ufffd\ufffd"
    end = of_byte[b"x"]
    assert Detokenizer(tokenizer, ids).push([end]) == "x"
    assert Detokenizer(tokenizer, ids[:1]).push([*ids[1:], end]).lstrip("\ufffd") == "x"


def test_character_begun_in_the_prompt_is_shown_whole(byte_level):
    ids = byte_level.encode("x🎈y", add_special_tokens=False)
    for cut in range(1, len(ids)):
        text = "".join(read(Detokenizer(byte_level, ids[:cut]), [ids[cut:]]))
        assert text in ("🎈y", "y"), (cut, text)


def test_special_tokens_are_skipped_and_added_ones_shown(byte_level):
    ids = byte_level.encode("a<|end|>b<think>c", add_special_tokens=False)
    assert "".join(read(Detokenizer(byte_level, []), [ids])) == "ab<think>c"


def test_sentencepiece_keeps_the_space_after_a_prompt_and_drops_it_at_a_start(sentencepiece):
    ids = sentencepiece.encode("the cat", add_special_tokens=False)
    bos = sentencepiece.bos_token_id
    prompt = sentencepiece.encode("the")
    assert "".join(read(Detokenizer(sentencepiece, [bos]), [ids])) == "the cat"
    assert "".join(read(Detokenizer(sentencepiece, prompt), [ids])) == " the cat"


# Stop strings


def reference_stop(texts: list[str], stops: list[str], min_tokens: int) -> tuple[str, str | None]:
    """The definition: the first place where a stop string is complete, the longest one there."""
    text = "".join(texts)
    ends = []
    for number, piece in enumerate(texts, start=1):
        ends += [number] * len(piece)
    for end in range(1, len(text) + 1):
        if ends[end - 1] < min_tokens:
            continue
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@FAST
@hypothesis.given(
    text=st.text("abc", min_size=1, max_size=40),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 4), max_size=20),
    min_tokens=st.integers(0, 12),
)
def test_text_ends_before_the_first_complete_stop_string(
    byte_level, text, stops, sizes, min_tokens
):
    ids = [byte_level.token_id(character) for character in text]
    expected, stop = reference_stop(list(text), stops, min_tokens)
    detokenizer = Detokenizer(byte_level, [], StopAutomaton(stops), min_tokens)
    shown = ""
    for piece in chunks(ids, sizes):
        shown += detokenizer.push(piece)
        assert expected.startswith(shown)  # nothing of a stop string is ever shown
    assert shown + detokenizer.finish() == expected
    assert detokenizer.stop_reason == stop


@pytest.mark.parametrize("offset", range(12))
def test_stop_string_at_any_offset_of_tokens(tokenizer, offset):
    before = "abcdefgh 你🎈!"[:offset]
    ids = tokenizer.encode(before + "STOP here", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, [], StopAutomaton(["STOP"]))
    shown = "".join(detokenizer.push([token]) for token in ids) + detokenizer.finish()
    assert shown == before
    assert detokenizer.stop_reason == "STOP"
    assert detokenizer.num_tokens < len(ids)


def test_only_what_may_become_a_stop_string_is_held_back(byte_level):
    detokenizer = Detokenizer(byte_level, [], StopAutomaton(["\n\nUser:", "END"]))
    shown = [
        detokenizer.push(byte_level.encode(character, add_special_tokens=False))
        for character in "aE b\n\nUsual"
    ]
    assert shown == ["a", "", "E ", "b", "", "", "", "", "\n\nUsu", "a", "l"]


def test_held_back_text_comes_at_the_end(byte_level):
    detokenizer = Detokenizer(byte_level, [], StopAutomaton(["END"]))
    assert detokenizer.push(byte_level.encode("the EN", add_special_tokens=False)) == "the "
    assert detokenizer.finish() == "EN"


def test_stop_string_before_min_tokens_is_text(byte_level):
    ids = [byte_level.token_id(character) for character in "abcabc"]
    detokenizer = Detokenizer(byte_level, [], StopAutomaton(["bc"]), min_tokens=4)
    assert "".join(read(detokenizer, [ids])) == "abca"
    assert detokenizer.num_tokens == 6


def test_many_stop_strings_against_their_definition(byte_level):
    generator = random.Random(5)
    stops = ["".join(generator.choices("ab \n", k=generator.randint(3, 9))) for _ in range(64)]
    text = "".join(generator.choices("abc \n", k=400))
    ids = byte_level.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(byte_level, [], StopAutomaton(stops))
    shown = "".join(read(detokenizer, [[token] for token in ids]))
    assert (shown, detokenizer.stop_reason) == reference_stop(list(text), stops, 0)
