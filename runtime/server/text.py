"""A model's tokeniser as the front end uses it: encoding off the event loop, decoding for detokenisers."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# Longer texts are encoded in a thread.
_INLINE_CHARACTERS = 2048
# What a message without content costs, as characters of text.
_MESSAGE_CHARACTERS = 32


class TextCodec:
    """Text to tokens and back, by a ``transformers.PreTrainedTokenizerFast``.

    The tokeniser is only read after construction, so that the thread and the event loop can use it at once.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._chat = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenise")
        self.all_special_ids: frozenset[int] = frozenset(tokenizer.all_special_ids)
        # No token stands for more characters than this.
        self.max_token_characters: int = max(map(len, self._backend.get_vocab()))

    async def encode(self, text: str) -> tuple[int, ...]:
        """Tokenise ``text`` as it is, with what the model wants in front of every text (such as a BOS token)."""
        return await self._run(lambda: self._encode(text, add_special_tokens=True), len(text))

    async def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Put messages (``role``, ``content``) into the chat template, up to where the answer begins, and tokenise.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        if not self._chat.chat_template:
            raise ValueError("this model has no chat template: use text")
        from jinja2 import TemplateError

        def encode() -> tuple[int, ...]:
            text = self._chat.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
            # The template has put in what the model wants in front.
            return self._encode(text, add_special_tokens=False)

        size = sum(len(message["content"]) + _MESSAGE_CHARACTERS for message in messages)
        try:
            return await self._run(encode, size)
        except TemplateError as error:
            raise ValueError(f"the model's chat template refuses it: {error}") from error

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of ``token_ids``; bytes that form no character become U+FFFD."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    async def _run(self, encode: Callable[[], tuple[int, ...]], num_characters: int) -> tuple[int, ...]:
        """Encode here what is short, and in the thread what would hold up the event loop."""
        if num_characters <= _INLINE_CHARACTERS:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._pool, encode)
