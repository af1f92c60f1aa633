"""The detokeniser: what it streams is what decoding at once gives, whole characters, stop strings never shown."""

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from loongserve.runtime.detokenizer import REPLACEMENT, IncrementalDetokenizer, StopMatcher, TokenDecoder

TEXTS = [
    "plain words, with\n\tspaces and  more   spaces",
    "龙服务:弹性序列并行。你好,世界!",
    "👍🏽 family 👨‍👩‍👧‍👦, flags 🇨🇳🇩🇪, rainbow 🏳️‍🌈",
    "combining e\u0301 and Zalgo h̷̢e̶̛l̵p, عربى, हिन्दी, ไทย",
    "a genuine \ufffd replacement \ufffd\ufffd character",
    "x" * 500 + "é" * 300 + "🐉" * 200,
]


class _Decoder:
    """A tokeniser of the `tokenizers` library as a ``TokenDecoder``."""

    def __init__(self, tokenizer: Tokenizer, special: Sequence[int] = ()) -> None:
        self.tokenizer = tokenizer
        self.all_special_ids = list(special)
        self.longest = 0

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        self.longest = max(self.longest, len(token_ids))
        return self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def _byte_level() -> _Decoder:
    """One token a byte (the hardest case), some of two and three bytes, and one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    merges = [("ð", "Ł"), ("Ġ", "ð"), ("ä", "½"), ("Ġð", "Ł"), ("e", "r"), ("ï", "¿")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return _Decoder(tokenizer, [tokenizer.token_to_id("<|end|>")])


def _byte_fallback() -> _Decoder:
    """SentencePiece style: words with a marked space, and one token a byte for the rest."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for word in ("▁plain", "▁words", "▁", "s", "a", "你", ","):
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _Decoder(tokenizer)


BYTE_LEVEL = _byte_level()
BYTE_FALLBACK = _byte_fallback()


def _stream(decoder: TokenDecoder, ids: Sequence[int], stop: Sequence[str] = (), skip: bool = True) -> list[str]:
    detokenizer = IncrementalDetokenizer(decoder, stop, skip)
    return [detokenizer.push(token) for token in ids] + [detokenizer.finish()]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_text_comes_back_in_whole_characters(text: str) -> None:
    ids = BYTE_LEVEL.tokenizer.encode(text).ids
    pieces = _stream(BYTE_LEVEL, ids)
    assert "".join(pieces) == text
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in piece for piece in pieces)


@settings(max_examples=200, deadline=None)
@given(ids=st.lists(st.integers(0, BYTE_LEVEL.tokenizer.get_vocab_size() - 1), max_size=160), skip=st.booleans())
def test_any_tokens_give_what_decoding_at_once_gives(ids: list[int], skip: bool) -> None:
    whole = BYTE_LEVEL.decode(ids, skip_special_tokens=skip)
    assert "".join(_stream(BYTE_LEVEL, ids, skip=skip)) == whole


@settings(max_examples=100, deadline=None)
@given(ids=st.lists(st.sampled_from([0x80 + i for i in range(128)]).map(lambda byte: byte), min_size=60, max_size=400))
def test_long_runs_of_broken_bytes(ids: list[int]) -> None:
    # Token ids are by alphabet, not by byte: the upper half of it is mostly bytes above 127.
    assert "".join(_stream(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


def test_broken_bytes_are_not_held_for_ever() -> None:
    broken = BYTE_LEVEL.tokenizer.token_to_id("Ģ")
    pieces = _stream(BYTE_LEVEL, [broken] * 40)
    assert "".join(pieces[:10])
    assert "".join(pieces) == REPLACEMENT * 40


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.sampled_from("plain words你,sa 龙🐉éไ\n"), max_size=80), long=st.integers(0, 40))
def test_byte_fallback(text: str, long: int) -> None:
    whole = text + "ไทย🐉" * long + "s"
    ids: list[int] = []
    for character in " " + whole:
        token = BYTE_FALLBACK.tokenizer.token_to_id(character.replace(" ", "▁"))
        ids += [token] if token is not None else list(character.encode())
    assert "".join(_stream(BYTE_FALLBACK, ids)) == whole


def test_cost_does_not_grow_with_the_text() -> None:
    decoder = _byte_level()
    ids = decoder.tokenizer.encode("many words 龙 and 🐉 dragons " * 200).ids
    for token in (detokenizer := IncrementalDetokenizer(decoder)) and ids:
        detokenizer.push(token)
    assert decoder.longest < 40


def test_special_tokens() -> None:
    end = BYTE_LEVEL.all_special_ids[0]
    ids = [*BYTE_LEVEL.tokenizer.encode("ab").ids, end, *BYTE_LEVEL.tokenizer.encode("c").ids]
    assert "".join(_stream(BYTE_LEVEL, ids)) == "abc"
    assert "".join(_stream(BYTE_LEVEL, ids, skip=False)) == "ab<|end|>c"


def test_half_a_character_at_the_end_is_flushed() -> None:
    ids = BYTE_LEVEL.tokenizer.encode("a🐉").ids[:-1]
    assert "".join(_stream(BYTE_LEVEL, ids)) == "a" + REPLACEMENT


@pytest.mark.parametrize(
    ("text", "stop", "expected", "stopped"),
    [
        ("one END two", ["END"], "one ", "END"),
        ("one EN two", ["END"], "one EN two", None),
        ("one EN", ["END"], "one EN", None),
        ("EEND", ["END"], "E", "END"),
        ("aabaac", ["aac"], "aab", "aac"),
        ("abX", ["abc", "bX"], "a", "bX"),
        ("abcd", ["abcd", "bc"], "a", "bc"),
        ("xab", ["b", "ab"], "x", "ab"),
        ("你好。再见", ["。再"], "你好", "。再"),
        ("🐉🐲", ["🐲"], "🐉", "🐲"),
        ("abc", ["abc"], "", "abc"),
        ("", ["x"], "", None),
    ],
)
def test_stop_strings(text: str, stop: list[str], expected: str, stopped: str | None) -> None:
    ids = BYTE_LEVEL.tokenizer.encode(text).ids
    detokenizer = IncrementalDetokenizer(BYTE_LEVEL, stop)
    got = "".join(detokenizer.push(token) for token in ids)
    assert got + detokenizer.finish() == expected
    assert detokenizer.stopped == stopped


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", max_size=30),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=8),
)
def test_stop_strings_do_not_depend_on_the_pieces(text: str, stop: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stop)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    got, shown = "", []
    for begin, end in itertools.pairwise(bounds):
        got += matcher.push(text[begin:end])
        shown.append((end, got))
    held_longest = max((len(got) for _, got in shown), default=0)
    got += matcher.finish()
    # Plainly: the first end of any stop string, and of those that end there the longest.
    ends = [(end, -len(string)) for string in stop for end in range(len(text) + 1) if text[:end].endswith(string)]
    if ends:
        end, length = min(ends)
        assert got == text[: end + length]
        assert matcher.stopped == text[end + length : end]
    else:
        assert got == text
        assert matcher.stopped is None
    assert held_longest <= len(got)
    for end, passed in shown:
        if not ends:
            # No more is held back than the longest stop string could need.
            assert len(passed) >= end - max((len(string) - 1 for string in stop), default=0)


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])


def test_requests_do_not_share_state() -> None:
    texts = random.Random(1).sample(TEXTS, len(TEXTS))
    streams = [IncrementalDetokenizer(BYTE_LEVEL) for _ in texts]
    tokens = [BYTE_LEVEL.tokenizer.encode(text).ids for text in texts]
    got = [""] * len(texts)
    for step in range(max(map(len, tokens))):
        for i, ids in enumerate(tokens):
            if step < len(ids):
                got[i] += streams[i].push(ids[step])
    assert [text + stream.finish() for text, stream in zip(got, streams, strict=True)] == texts
