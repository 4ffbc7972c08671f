"""SentencePiece models under three of Megatron's names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.data.tokenizers.base import Tokenizer, check_ids, encode_with, join_arrays, join_lists, read_with
from megatron.errors import DataError


class SentencePieceTokenizer:
    """A SentencePiece model, with names that Megatron appends to its pieces when `appended` is given.

    add_bos: the model's beginning-of-sentence id comes before every text.
    """

    def __init__(
        self, processor: Any, eod: int, appended: Sequence[str] = (), *, add_bos: bool = False, num_threads: int = 1
    ) -> None:
        self._processor = processor
        self._pieces = int(processor.get_piece_size())
        self._appended = list(appended)
        self._settings = {"add_bos": add_bos, "num_threads": num_threads}
        self.eod = eod
        self.vocab_size = self._pieces + len(self._appended)

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        texts = list(texts)
        ids: list[list[int]] = encode_with(lambda: self._processor.encode(texts, **self._settings), texts)
        return ids

    def encode_batch_arrays(
        self, texts: Sequence[str], dtype: npt.DTypeLike
    ) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        if not hasattr(self._processor, "encode_as_numpy"):  # an older sentencepiece
            return join_lists(self.encode_batch(texts), dtype, self.vocab_size)
        texts = list(texts)
        arrays = encode_with(lambda: self._processor.encode_as_numpy(texts, **self._settings), texts)
        return join_arrays(arrays, dtype, self.vocab_size)

    def decode(self, ids: Sequence[int]) -> str:
        parts, run = [], []
        for i in check_ids(ids, self.vocab_size):
            if i < self._pieces:
                run.append(i)
                continue
            parts += [self._processor.decode(run), self._appended[i - self._pieces]]
            run = []
        return "".join([*parts, self._processor.decode(run)])


def sentence_piece(tokenizer_type: str, path: Path, *, vocab_extra_ids: int, num_threads: int) -> Tokenizer:
    """SentencePieceTokenizer (the only one with `vocab_extra_ids`), GPTSentencePieceTokenizer or Llama2Tokenizer."""

    def read() -> Any:
        from sentencepiece import SentencePieceProcessor

        return SentencePieceProcessor(model_file=str(path))

    processor = read_with(path, "a SentencePiece model", read)
    if tokenizer_type == "SentencePieceTokenizer":
        known = _with_megatrons_names(processor, vocab_extra_ids)
        appended = [piece for piece, i in known.items() if i >= processor.get_piece_size()]
        return SentencePieceTokenizer(processor, known["<EOD>"], appended, num_threads=num_threads)
    eod, add_bos = processor.eos_id(), tokenizer_type == "Llama2Tokenizer"
    if eod < 0:
        raise DataError(f"{path}: the model has no end-of-sentence piece to end documents: use SentencePieceTokenizer")
    if add_bos and processor.bos_id() < 0:
        raise DataError(
            f"{path}: the model has no beginning-of-sentence piece, which Llama2Tokenizer puts before every text: use "
            f"GPTSentencePieceTokenizer"
        )
    return SentencePieceTokenizer(processor, eod, add_bos=add_bos, num_threads=num_threads)


def _with_megatrons_names(processor: Any, vocab_extra_ids: int) -> dict[str, int]:
    """The ids of all pieces and of those that Megatron appends, in Megatron's order: data and checkpoints agree."""
    known = {processor.id_to_piece(i): i for i in range(processor.get_piece_size())}
    size = processor.get_piece_size()
    special = ["<CLS>", "<SEP>", "<EOD>", "<MASK>"]
    for i, name in ((processor.pad_id(), "<PAD>"), (processor.bos_id(), "<BOS>"), (processor.eos_id(), "<EOS>")):
        special.append(processor.id_to_piece(i) if i >= 0 else name)
    for piece in special + [f"<extra_id_{i}>" for i in range(vocab_extra_ids)]:
        if piece not in known:
            known[piece] = size
            size += 1
    return known
