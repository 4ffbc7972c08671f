"""Fill-in-the-middle: documents of the training data as prefix, suffix, middle.

A document's text is cut at two random characters, and its middle moves to the end, behind tokens
that name the three parts (Bavarian et al., arXiv 2207.14255). The parts are tokenized on their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from megatron.config.settings import all_options
from megatron.data.arrays import Int64Array, IntArray
from megatron.errors import ConfigError
from megatron.parallel.hashing import mix
from megatron.parallel.keyed_random import name_key

if TYPE_CHECKING:
    from megatron.config import Config
    from megatron.config.io import DataConfig
    from megatron.data.tokenizer_adapters import Tokenizer

_UNREADABLE = "\ufffd"
_NOTHING = np.zeros(0, np.int64)


@dataclass(frozen=True)
class FillInTheMiddle:
    """Rearrangement of the documents of a sample, which depends on the sample's position alone.

    The text of a document that begins before the sample, or ends after it, is what the sample has
    of it. Texts with bytes that are not characters stay as they are: their tokens could not be had
    back.

    prefix, middle, suffix, pad  ids of these tokens
    separator                    id of --fim-split-sample
    """

    data: DataConfig
    tokenizer: Tokenizer
    seed: int
    prefix: int
    middle: int
    suffix: int
    pad: int
    separator: int | None = None

    @classmethod
    def of(cls, config: Config, tokenizer: Tokenizer | None) -> FillInTheMiddle | None:
        """Return the rearrangement that the flags request, or None.

        Raises ConfigError for tokens that the tokenizer does not have, and for equal ones.
        """
        data = config.data
        if not data.fim_rate:
            return None
        assert tokenizer is not None, "the command line was checked"

        options = all_options()
        settings = [f"fim_{name}_token" for name in ("prefix", "middle", "suffix", "pad", "eod")]
        names = {name: getattr(data, name) for name in (*settings, "fim_split_sample")}
        names = {name: text for name, text in names.items() if text is not None}
        ids = {n: i for n, text in names.items() if (i := tokenizer.id_of(text)) is not None}
        if missing := [options[n].written(text) for n, text in names.items() if n not in ids]:
            raise ConfigError(
                f"the tokenizer does not have the tokens of {', '.join(missing)}: give names of "
                "tokens that it has, or leave out --fim-rate"
            )
        if ids.get("fim_eod_token", tokenizer.eod) != tokenizer.eod:
            raise ConfigError(
                f"--fim-eod-token {data.fim_eod_token} is not the token that ends a document, "
                f"{tokenizer.decode([tokenizer.eod])!r}: leave --fim-eod-token out"
            )
        prefix, middle, suffix, pad = (ids[name] for name in settings[:4])
        if len({prefix, middle, suffix}) < 3:
            raise ConfigError(
                f"{', '.join(options[name].written(names[name]) for name in settings[:3])} must be "
                "three different tokens"
            )
        separator = ids.get("fim_split_sample")
        return cls(
            data, tokenizer, config.training.seed, prefix, middle, suffix, pad, separator=separator
        )

    def __call__(
        self, position: int, tokens: Int64Array, joined: IntArray = _NOTHING
    ) -> tuple[Int64Array, Int64Array]:
        """Return the sample at `position`, and 1 for each of its tokens that counts as a label.

        Padding does not count. `joined` lists the tokens that do not follow the one before them in a
        text, and do not count either: texts end before them. What the additional tokens push beyond
        the end of the sample is cut off, and a sample that has become shorter is padded, as in
        Megatron-LM. All but `joined` are int64 [s + 1].
        """
        key = mix(self.seed, name_key("fill in the middle"), position)
        random = np.random.RandomState(np.array([key & 0xFFFFFFFF, key >> 32]))
        texts = [
            np.concatenate(
                _by_piece(ids, self.tokenizer.eod, lambda ids: self._document(ids, random))
            )
            for ids in np.split(tokens, joined)
        ]
        filled = np.concatenate(texts)[: len(tokens)]
        counts = np.ones_like(filled)
        starts = np.cumsum([len(text) for text in texts[:-1]], dtype=np.int64)
        counts[starts[starts < len(filled)]] = 0
        padding = 0, len(tokens) - len(filled)
        result = np.pad(filled, padding, constant_values=self.pad)
        return result, np.pad(counts, padding)

    def _document(self, ids: Int64Array, random: np.random.RandomState) -> list[Int64Array]:
        if self.separator is None or self.separator not in ids:
            return self._rearranged(ids, self.data.fim_rate, random)
        if random.random_sample() >= self.data.fim_rate:
            return [ids]
        rate = self.data.fim_fragment_rate
        return _by_piece(ids, self.separator, lambda file: self._rearranged(file, rate, random))

    def _rearranged(
        self, ids: Int64Array, rate: float, random: np.random.RandomState
    ) -> list[Int64Array]:
        if not len(ids) or random.random_sample() >= rate:
            return [ids]
        text = self.tokenizer.decode(ids.tolist())
        avoided = self.data.fim_no_prefix
        if _UNREADABLE in text or (avoided is not None and text.startswith(avoided)):
            return [ids]
        low, high = sorted(random.randint(0, len(text) + 1, size=2).tolist())
        texts = ["", text[:low], text[low:high], text[high:]]
        encoded = [np.array(one, np.int64) for one in self.tokenizer.encode_batch(texts)]
        behind = self.tokenizer.behind  # tokens that the tokenizer puts around every text
        before = len(encoded[0]) - behind
        prefix, middle, suffix = (one[before : len(one) - behind] for one in encoded[1:])
        marks = [np.array([i]) for i in (self.prefix, self.suffix, self.middle)]
        if random.random_sample() < self.data.fim_spm_rate:  # the paper's SPM, variant 2
            return [marks[0], marks[1], suffix, marks[2], prefix, middle]
        return [marks[0], prefix, marks[1], suffix, marks[2], middle]


def _by_piece(
    ids: Int64Array, end: int, rearrange: Callable[[Int64Array], list[Int64Array]]
) -> list[Int64Array]:
    """Return what a function makes of the ids before each `end`, with these ends, and of the rest."""
    pieces = list[Int64Array]()
    for piece in np.split(ids, np.flatnonzero(ids == end) + 1):
        size = len(piece) - int(np.sum(piece[-1:] == end))
        pieces += [*rearrange(piece[:size]), piece[size:]]
    return pieces
