"""The text of token ids that arrive one by one."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.data.tokenizer_adapters import Tokenizer

_REPLACEMENT = "\ufffd"  # tokenizers return it for bytes that are not a character
_MOST_OPEN = 3  # bytes of a character in UTF-8 that may wait for its last byte


class TextStream:
    """Text after `before`, passed on in whole characters and without a stop string.

    before   the preceding ids: a tokenizer may join words differently at the start of a text
    stop     strings at which the text ends, and which are not part of it
    text     everything passed on so far
    stopped  the stop string that was found; None if none was found yet

    A token may end inside a character, and a stop string may span several tokens. Text is held back
    while it may be part of such a character or the beginning of a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int], stop: Sequence[str]) -> None:
        assert "" not in stop, "an empty stop string ends every text"
        self._decode = tokenizer.decode
        self._stop = stop
        self.text = ""
        self._waiting = ""
        self.stopped: str | None = None
        # The text of a few tokens depends on where they start. Text is therefore decoded from the
        # second-last position at which it ended with a whole character, and the part already known
        # is cut off.
        self._ids = list(before)
        self._ended = len(before)
        self._known = len(self._decode(self._ids))

    def add(self, token: int) -> str:
        """Append a token; return the text that can be shown now."""
        self._ids.append(token)
        decoded = self._decode(self._ids)
        bare = decoded.rstrip(_REPLACEMENT)
        shown = max(len(bare), len(decoded) - _MOST_OPEN, self._known)
        fresh = decoded[self._known : shown]
        self._known = shown
        if shown == len(decoded):
            self._ids = self._ids[self._ended :]
            self._ended = len(self._ids)
            self._known = len(self._decode(self._ids))
        return self._passed(fresh)

    def end(self) -> str:
        """Return the rest of the text."""
        if self.stopped is not None:
            return ""
        shown = self._passed(self._decode(self._ids)[self._known :])
        if self.stopped is None:
            self.text += self._waiting
            shown = shown + self._waiting
            self._waiting = ""
        return shown

    def _passed(self, fresh: str) -> str:
        """Return the waiting text and `fresh`, up to a stop string or to what may begin one."""
        text = self._waiting + fresh
        matches = [(at, stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if matches:
            end, self.stopped = min(matches)
        else:
            end = len(text) - max((_overlap(text, stop) for stop in self._stop), default=0)
        self._waiting = "" if matches else text[end:]
        self.text += text[:end]
        return text[:end]


def _overlap(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` are the beginning of `stop`."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
