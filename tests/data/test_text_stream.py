"""The text of tokens that arrive one by one: whole characters, and the ends of stop strings."""

from hypothesis import given
from hypothesis import strategies as st

from megatron.data.text_stream import TextStream
from megatron.data.tokenizer import Tokenizer
from tests.helpers.text import ByteTokenizer


class PieceTokenizer(Tokenizer):
    """Tokens of several bytes, which may end inside a character; the first space of a text goes.

    As in SentencePiece, whose texts begin with a space that is not theirs.
    """

    def __init__(self, token_bytes):
        super().__init__(len(token_bytes), len(token_bytes) - 1)
        self.token_bytes = token_bytes

    def _encode(self, texts):
        raise NotImplementedError

    def _decode(self, ids):
        return b"".join(self.token_bytes[i] for i in ids).decode(errors="replace").removeprefix(" ")


def streamed(tokenizer, tokens, stop, before=()):
    stream = TextStream(tokenizer, before, stop)
    chunks = []
    for token in tokens:
        chunks.append(stream.add(token))
        if stream.stopped is not None:
            break
    chunks.append(stream.end())
    return chunks, stream


TEXTS = st.text(alphabet="ab éß€你好😀\n", max_size=20)


@given(TEXTS, TEXTS, st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_any_cut_of_the_bytes_gives_the_text(before, text, sizes):
    rest = text.encode()
    token_bytes = [(" " + before).encode()]
    while rest:
        for size in sizes:
            token_bytes.append(rest[:size])
            rest = rest[size:]
    tokenizer = PieceTokenizer(token_bytes)
    shown, stream = streamed(tokenizer, range(1, len(token_bytes)), (), before=[0])
    assert "".join(shown) == stream.text == text
    assert all("\ufffd" not in piece for piece in shown)


@given(
    st.text(alphabet="abé", max_size=16),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=4), max_size=3),
)
def test_the_text_ends_before_the_stop_string_that_is_complete_first(text, stop):
    tokens = list(text.encode())
    shown, stream = streamed(ByteTokenizer(), tokens, stop)
    ends = [at + len(one) for one in stop if (at := text.find(one)) >= 0]
    if not ends:
        assert stream.stopped is None and "".join(shown) == stream.text == text
        return
    matches = [one for one in stop if text[: min(ends)].endswith(one)]
    longest = max(matches, key=len)
    assert stream.stopped == longest
    assert "".join(shown) == stream.text == text[: min(ends) - len(longest)]


def test_bytes_that_are_no_character_are_shown_in_the_end():
    for tokens, text in (
        (b"a\xff", "a\ufffd"),
        (b"\xffb", "\ufffdb"),
        (b"a\xe4\xbd", "a\ufffd"),
        (b"\xff" * 9, "\ufffd" * 9),
    ):
        shown, stream = streamed(ByteTokenizer(), tokens, ())
        assert "".join(shown) == stream.text == text


def test_text_is_shown_as_soon_as_it_is_certain():
    stream = TextStream(ByteTokenizer(), b"x", ["END"])
    shown = [stream.add(byte) for byte in "aEé你ENEND".encode()]
    assert shown == ["a", "", "", "Eé", "", "", "你", "", "", "EN", "", ""]
    assert (stream.text, stream.stopped) == ("aEé你EN", "END")
