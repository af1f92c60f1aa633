"""Turn one request's tokens into text as they come: no half characters, nothing that may become a stop string.

One detokeniser a request, in one place: its state is the text so far, which no other worker could continue.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"

# A character has at most four bytes, so that this many tokens that end in half a character are broken for good.
_MAX_CHARACTER_TOKENS = 4
# The window of tokens that is decoded anew for each token is cut after a whole character when it reaches the first
# bound, at the second bound in any case. Some tokens of context stay: the first word of a text may lose its space.
_CONTEXT_TOKENS = 8
_WINDOW_TOKENS = 24
_MAX_WINDOW_TOKENS = 96


class TokenDecoder(Protocol):
    """The part of a tokeniser that detokenising needs; those of transformers have it."""

    @property
    def all_special_ids(self) -> Collection[int]:
        """Tokens that ``skip_special_tokens`` leaves out."""
        ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of ``token_ids``; bytes that form no character become U+FFFD."""
        ...


class StopMatcher:
    """Pass text on as soon as it can no longer be part of a stop string (Knuth, Morris, Pratt; one state a string).

    What is passed on does not depend on how the text was cut into pieces: the stop string whose last character comes
    first wins, and of several that end there the longest.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if any(not string for string in stop):
            raise ValueError("a stop string must have at least 1 character, got an empty one")
        self._stop = tuple(stop)
        self._failures = [_failures(string) for string in self._stop]
        self._matched = [0] * len(self._stop)
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """Add ``text``; return what is sure to come before any stop string."""
        if self.stopped is not None:
            return ""
        if not self._stop:
            return text
        text = self._held + text
        for index in range(len(self._held), len(text)):
            for i, string in enumerate(self._stop):
                state = self._advance(i, text[index])
                if state == len(string) and (self.stopped is None or state > len(self.stopped)):
                    self.stopped = string
            if self.stopped is not None:
                self._held = ""
                return text[: index + 1 - len(self.stopped)]
        kept = len(text) - max(self._matched)
        self._held = text[kept:]
        return text[:kept]

    def finish(self) -> str:
        """Return what was held back: no more text comes."""
        held, self._held = self._held, ""
        return held

    def _advance(self, i: int, character: str) -> int:
        string, failures, state = self._stop[i], self._failures[i], self._matched[i]
        if state == len(string):
            state = failures[-1]
        while state and string[state] != character:
            state = failures[state - 1]
        if string[state] == character:
            state += 1
        self._matched[i] = state
        return state


class IncrementalDetokenizer:
    """The text of one request, token by token.

    The pieces of ``push`` and ``finish`` together are what the tokeniser gives for all tokens at once, up to a stop
    string. (One case differs: where a tokeniser with byte fallback follows whole characters made of bytes with a broken
    one, decoding at once turns all of them into U+FFFD, which a stream can't take back.) Each token costs the decoding
    of a short window, however long the text is.
    """

    def __init__(self, tokenizer: TokenDecoder, stop: Sequence[str] = (), skip_special_tokens: bool = True) -> None:
        """Start with no text.

        Args:
            tokenizer: is only read, and may be shared by all requests.
            stop: strings that end the text, none of them empty.
            skip_special_tokens: leave special tokens out of the text.

        Raises:
            ValueError: a stop string is empty.
        """
        self._tokenizer = tokenizer
        self._matcher = StopMatcher(stop)
        self._skip_special_tokens = skip_special_tokens
        self._skipped = frozenset(tokenizer.all_special_ids) if skip_special_tokens else frozenset()
        self._window: list[int] = []
        # Characters of the window's text that have been passed on.
        self._passed = 0
        # Tokens since the text last ended in a whole character.
        self._pending = 0
        # An early place in the window where it did; the window is cut there.
        self._cut = 0

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the text, or None."""
        return self._matcher.stopped

    def push(self, token_id: int) -> str:
        """Add a token; return the text that it makes certain, which may be empty. After a stop string: empty."""
        if self.stopped is not None or token_id in self._skipped:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        if text.endswith(REPLACEMENT):
            self._pending += 1
            if self._pending < _MAX_CHARACTER_TOKENS:
                return ""
            # Only the last of the broken characters can still become a whole one.
            certain = len(text) - 1
        else:
            self._pending = 0
            certain = len(text)
        delta = text[self._passed : certain]
        self._passed = max(self._passed, certain)
        self._trim(len(text) - self._passed)
        return self._matcher.push(delta)

    def finish(self) -> str:
        """Return the rest of the text: no more tokens come. After a stop string: empty."""
        if self.stopped is not None:
            return ""
        delta = self._decode(self._window)[self._passed :]
        self._window, self._passed, self._pending, self._cut = [], 0, 0, 0
        delta = self._matcher.push(delta)
        return delta if self.stopped is not None else delta + self._matcher.finish()

    def _trim(self, unpassed: int) -> None:
        """Shorten the window, whose last ``unpassed`` characters have not been passed on, from its front."""
        size = len(self._window)
        whole = self._pending == 0
        if whole and size >= _WINDOW_TOKENS and self._cut > 0:
            cut = self._cut
        elif size >= _MAX_WINDOW_TOKENS:
            cut = size - _CONTEXT_TOKENS
        else:
            if whole and (self._cut == 0 or size <= _WINDOW_TOKENS - _CONTEXT_TOKENS):
                self._cut = size
            return
        self._window = self._window[cut:]
        self._cut = 0
        self._passed = len(self._decode(self._window)) - unpassed

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip_special_tokens)


def _failures(string: str) -> list[int]:
    """For each prefix of ``string``, the length of its longest proper prefix that is also its suffix."""
    failures = [0] * len(string)
    state = 0
    for index in range(1, len(string)):
        while state and string[state] != string[index]:
            state = failures[state - 1]
        if string[state] == string[index]:
            state += 1
        failures[index] = state
    return failures
