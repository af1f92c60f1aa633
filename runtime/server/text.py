"""A model's tokeniser as the front end uses it: encoding off the event loop, decoding for detokenisers."""

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# Longer texts are encoded in a thread.
_INLINE_CHARACTERS = 2048


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
        return await self._encode(text, add_special_tokens=True)

    async def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """Put messages (``role``, ``content``) into the chat template, up to where the answer begins, and tokenise.

        Raises:
            ValueError: the model has no chat template, or the template refuses the messages.
        """
        if not self._chat.chat_template:
            raise ValueError("this model has no chat template: use text")
        from jinja2 import TemplateError

        try:
            text = self._chat.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise ValueError(f"the model's chat template refuses it: {error}") from error
        # The template has put in what the model wants in front.
        return await self._encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of ``token_ids``; bytes that form no character become U+FFFD."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        def encode() -> tuple[int, ...]:
            return tuple(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

        if len(text) <= _INLINE_CHARACTERS:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._pool, encode)
