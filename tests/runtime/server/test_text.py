"""The codec on the embedded model's tokeniser: what transformers gives, and streams that equal decoding at once."""

import asyncio
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loongserve.runtime.detokenizer import IncrementalDetokenizer
from loongserve.runtime.model.embedded import find_embedded_model
from loongserve.runtime.model.tokenizer import load_tokenizer
from loongserve.runtime.server.text import TextCodec

TEXTS = [
    "Hello, world!  2024\n\n\tx",
    "龙服务:弹性序列并行 👩‍👩‍👧‍👦🏳️‍🌈",
    "<|im_start|>user\nhi<|im_end|>",
    " lead and trail ",
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The embedded model's tokeniser."""
    return load_tokenizer(find_embedded_model())


@pytest.fixture(scope="module")
def codec(tokenizer: Any) -> TextCodec:
    """The same as the front end uses it."""
    return TextCodec(tokenizer)


@pytest.fixture(scope="module")
def broken(codec: TextCodec) -> list[int]:
    """All tokens that hold pieces of characters."""
    return [token for token in range(49152) if "\ufffd" in codec.decode([token], skip_special_tokens=False)]


def test_codec_agrees_with_transformers(tokenizer: Any, codec: TextCodec) -> None:
    async def body() -> None:
        for text in [*TEXTS, " ".join(TEXTS) * 200]:
            ids = await codec.encode(text)
            assert list(ids) == tokenizer.encode(text)
            for skip in (False, True):
                assert codec.decode(ids, skip_special_tokens=skip) == tokenizer.decode(
                    list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False
                )
            messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
            chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            assert list(await codec.encode_chat(messages)) == chat

    asyncio.run(body())


def test_long_texts_are_encoded_off_the_event_loop(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = TextCodec(tokenizer)
    threads: list[int] = []

    def encode(text: str, *, add_special_tokens: bool) -> SimpleNamespace:
        threads.append(threading.get_ident())
        return SimpleNamespace(ids=[len(text)])

    monkeypatch.setattr(codec, "_backend", SimpleNamespace(encode=encode))
    assert asyncio.run(codec.encode("short")) == (5,)
    assert asyncio.run(codec.encode("x" * 100_000)) == (100_000,)
    assert threads[0] == threading.get_ident()
    assert threads[1] != threading.get_ident()
    codec.close()


def test_long_chats_are_rendered_off_the_event_loop(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    codec = TextCodec(tokenizer)
    threads: list[int] = []

    def apply_chat_template(messages: Any, **_: Any) -> str:
        threads.append(threading.get_ident())
        return "a"

    template = SimpleNamespace(chat_template="set", apply_chat_template=apply_chat_template)
    monkeypatch.setattr(codec, "_chat", template)
    for chat in ([("user", "hi")], [("user", "")] * 1000, [("user", "x" * 100_000)]):
        messages = [{"role": role, "content": content} for role, content in chat]
        assert asyncio.run(codec.encode_chat(messages)) == tuple(tokenizer.encode("a"))
    assert threads[0] == threading.get_ident()
    assert threading.get_ident() not in threads[1:]
    codec.close()


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), count=st.integers(0, 300), skip=st.booleans())
def test_any_tokens_stream_to_what_decoding_at_once_gives(
    codec: TextCodec, broken: list[int], seed: int, count: int, skip: bool
) -> None:
    draw = random.Random(seed)
    # Half of them from what holds pieces of characters, which are rare among all.
    ids = [draw.choice(broken) if draw.random() < 0.5 else draw.randrange(49152) for _ in range(count)]
    detokenizer = IncrementalDetokenizer(codec, (), skip)
    pieces = [detokenizer.push(token) for token in ids] + [detokenizer.finish()]
    assert "".join(pieces) == codec.decode(ids, skip_special_tokens=skip)


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=200))
def test_any_text_streams_to_what_decoding_at_once_gives(codec: TextCodec, text: str) -> None:
    ids = asyncio.run(codec.encode(text))
    detokenizer = IncrementalDetokenizer(codec, (), skip_special_tokens=False)
    assert "".join([detokenizer.push(token) for token in ids] + [detokenizer.finish()]) == codec.decode(
        ids, skip_special_tokens=False
    )
