"""SentencePiece models under three of Megatron's names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.data.tokenizers.base import Ids, Tokenizer, read_with
from megatron.errors import DataError


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, with names that Megatron appends to its pieces when `appended` is given.

    add_bos: the model's beginning-of-sentence id comes before every text.
    """

    def __init__(self, processor: Any, eod: int, appended: Sequence[str] = (), *, add_bos: bool = False) -> None:
        pieces = int(processor.get_piece_size())
        super().__init__(pieces + len(appended), eod, dict(enumerate(appended, pieces)))
        self._processor, self._add_bos = processor, add_bos

    def _encode(self, texts: list[str]) -> Sequence[Ids]:
        encode = getattr(self._processor, "encode_as_numpy", self._processor.encode)  # an older one gives lists
        found: Sequence[Ids] = encode(texts, add_bos=self._add_bos, num_threads=1)
        return found

    def _decode(self, ids: list[int]) -> str:
        text: str = self._processor.decode(ids)
        return text


def sentence_piece(tokenizer_type: str, path: Path, *, vocab_extra_ids: int) -> Tokenizer:
    """SentencePieceTokenizer (the only one with `vocab_extra_ids`), GPTSentencePieceTokenizer or Llama2Tokenizer."""

    def read() -> Any:
        from sentencepiece import SentencePieceProcessor

        return SentencePieceProcessor(model_file=str(path))

    processor = read_with(path, "a SentencePiece model", read)
    if tokenizer_type == "SentencePieceTokenizer":
        known = _with_megatrons_names(processor, vocab_extra_ids)
        appended = [piece for piece, i in known.items() if i >= processor.get_piece_size()]
        return SentencePieceTokenizer(processor, known["<EOD>"], appended)
    eod, add_bos = processor.eos_id(), tokenizer_type == "Llama2Tokenizer"
    if eod < 0:
        raise DataError(f"{path}: the model has no end-of-sentence piece to end documents: use SentencePieceTokenizer")
    if add_bos and processor.bos_id() < 0:
        raise DataError(
            f"{path}: the model has no beginning-of-sentence piece, which Llama2Tokenizer puts before every text: use "
            f"GPTSentencePieceTokenizer"
        )
    return SentencePieceTokenizer(processor, eod, add_bos=add_bos)


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
