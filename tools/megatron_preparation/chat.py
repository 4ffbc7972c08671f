"""Text of conversations, and the part of it that the model has to learn.

A line of JSON has {"messages": [{"role", "content"}, ...]}, and a chat template turns it into text,
or {"prompt", "completion"}, whose text is the two together. Turns of the assistant and completions
are in the loss, everything else only gives context.

A template is Jinja as in Hugging Face's tokenizer_config.json: the same variables, options and
sandbox as in transformers, without strftime_now, so that a text does not depend on the day. What
stands between {% generation %} and {% endgeneration %} is in the loss. A template without these
marks is also rendered up to the beginning and up to the end of each turn of the assistant, as for
generation, and the difference is in the loss; the parts must be beginnings of the whole.

A token is in the loss if one of its characters is. A token without characters, such as an
end-of-document token, is if the one before it is.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron.data.tokenizer import Tokenizer
from megatron.errors import ConfigError, DataError
from megatron.untrusted import read_json, read_text

DEFAULT = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '\\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
_MOST_BYTES = 1 << 24
# Unicode's noncharacters, which no text for interchange has.
_BEGIN, _END = "\ufdd0", "\ufdd1"
_MARKED = re.compile(r"\{%[-+]?\s*generation\b")
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Conversation:
    """A text and the ranges of its characters that are in the loss, in order.

    around   whether the tokens that the tokenizer puts around every text are wanted
    """

    text: str
    in_loss: Spans
    around: bool


@dataclass(frozen=True)
class Chat:
    """How lines become conversations.

    template    source of the chat template
    tokens      names of special tokens, and their texts, for the template
    max_tokens  of a conversation; a longer one is unusable. None: any number
    """

    template: str = DEFAULT
    tokens: tuple[tuple[str, str], ...] = ()
    max_tokens: int | None = None

    def read(self, document: dict[str, Any]) -> Conversation:
        """Return the conversation of a line. Raises DataError for a line of another form."""
        if "messages" in document:
            text, in_loss = self._render(document["messages"], document.get("tools"))
            found = Conversation(text, in_loss, around=False)
        elif "prompt" in document and "completion" in document:
            prompt, completion = document["prompt"], document["completion"]
            if not isinstance(prompt, str) or not isinstance(completion, str):
                raise DataError("'prompt' and 'completion' must both be strings")
            text = prompt + completion
            found = Conversation(text, ((len(prompt), len(text)),), around=True)
        else:
            raise DataError(
                "no key 'messages', and not both 'prompt' and 'completion': there are "
                f"{sorted(document)!s:.300}"
            )
        try:
            found.text.encode()
        except UnicodeEncodeError:
            raise DataError("half of a surrogate pair, which is not a character") from None
        if not any(start < stop for start, stop in found.in_loss):
            raise DataError("no turn of the assistant and no completion: nothing is in the loss")
        return found

    def encode(
        self, conversation: Conversation, tokenizer: Tokenizer, *, append_eod: bool
    ) -> tuple[list[int], npt.NDArray[np.uint8]]:
        """Return the ids of a conversation, and 1 for each that is in the loss, 0 for the others.

        Raises DataError if it is too long, or no token is in the loss.
        """
        ids, places = tokenizer.encode_with_places(conversation.text, special=conversation.around)
        inside = np.zeros(len(conversation.text) + 1, np.int64)
        for start, stop in conversation.in_loss:
            inside[start + 1 : stop + 1] = 1
        before = np.cumsum(inside)
        marks = before[places[:, 1]] > before[places[:, 0]]
        with_text = np.flatnonzero(places[:, 1] > places[:, 0])
        # of each token, the last one up to it that has characters; none before the first
        last = np.searchsorted(with_text, np.arange(len(ids)), side="right") - 1
        marks = np.where(last >= 0, marks[with_text[last]], False) if len(with_text) else marks
        if append_eod and len(ids) and ids[-1] != tokenizer.eod:
            ids, marks = [*ids, tokenizer.eod], np.append(marks, marks[-1])
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            raise DataError(f"{len(ids)} tokens, more than --max-tokens {self.max_tokens}")
        if not marks.any():
            raise DataError("the turns of the assistant have no token: nothing is in the loss")
        return ids, marks.astype(np.uint8)

    def _render(self, messages: Any, tools: Any) -> tuple[str, Spans]:
        if (
            not isinstance(messages, list)
            or not messages
            or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)
        ):
            raise DataError("'messages' must be a list of objects with 'role' and 'content'")
        try:
            written = json.dumps([messages, tools], ensure_ascii=False)
        except RecursionError:
            raise DataError("'messages' are nested too deeply") from None
        if _BEGIN in written or _END in written:
            raise DataError("U+FDD0 or U+FDD1 in a message, which are not characters")
        text, spans = _parted(self._text(messages, tools))
        if _MARKED.search(self.template):
            return text, spans
        spans = ()
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            start = self._text(messages[:i], tools, generate=True)
            stop = self._text(messages[: i + 1], tools)
            if not (text.startswith(stop) and stop.startswith(start)):
                raise DataError(
                    f"message {i}: the chat template writes it in another way when others follow, "
                    "so its place in the text is not known: put {% generation %} and "
                    "{% endgeneration %} around the assistant's turns in the template"
                )
            spans += ((len(start), len(stop)),)
        return text, spans

    def _text(self, messages: Sequence[Any], tools: Any, *, generate: bool = False) -> str:
        try:
            return compiled(self.template).render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=generate,
                **dict(self.tokens),
            )
        except Exception as error:  # whatever a template does with a message it does not expect
            raise DataError(
                f"the chat template fails: {type(error).__name__}: {error!s:.300}"
            ) from error


class _Generation(Extension):
    """The tag {% generation %}: puts marks around what it contains."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's name and type)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


@functools.cache
def compiled(template: str) -> Template:
    """Return a template that can be rendered. Raises ConfigError with the line of a mistake."""

    def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False) -> str:
        return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)

    def fail(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, LoopControlExtension]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = fail
    try:
        return environment.from_string(template)
    except TemplateError as error:
        line = getattr(error, "lineno", None)
        raise ConfigError(
            f"the chat template cannot be used: {error}" + (f" (line {line})" if line else "")
        ) from None


def _parted(marked: str) -> tuple[str, Spans]:
    """Return a text without marks, and the ranges between them."""
    pieces, text, spans = re.split(f"([{_BEGIN}{_END}])", marked), "", list[tuple[int, int]]()
    start: int | None = None
    for piece in pieces:
        if piece == _BEGIN and start is None:
            start = len(text)
        elif piece == _END and start is not None:
            spans.append((start, len(text)))
            start = None
        elif piece in (_BEGIN, _END):
            raise DataError("the chat template has {% generation %} within {% generation %}")
        else:
            text += piece
    return text, tuple(spans)


def find_chat(
    file: str | None, tokenizer_model: str | None, max_tokens: int | None = None
) -> tuple[Chat, str]:
    """Return the chat template of --chat-template, of the tokenizer, or the built-in one.

    Also return where it is from. `tokenizer_model` is the path of an HFTokenizer, whose folder may
    have chat_template.jinja and tokenizer_config.json. Raises DataError for files that cannot be
    read, ConfigError for a template with a mistake.
    """
    source, origin, tokens = DEFAULT, "the built-in one", dict[str, str]()
    if tokenizer_model is not None:
        path = Path(tokenizer_model)
        folder = path if path.is_dir() else path.parent
        settings_file, beside = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        if settings_file.is_file():
            settings = read_json(settings_file, _MOST_BYTES, error=DataError, bits=128)
            for name, value in settings.items():
                text = value.get("content") if isinstance(value, dict) else value
                if name.endswith("_token") and isinstance(text, str):
                    tokens[name] = text
            if own := _named_default(settings.get("chat_template")):
                source, origin = own, str(settings_file)
        if beside.is_file():
            source, origin = read_text(beside, _MOST_BYTES, error=DataError), str(beside)
    if file is not None:
        source, origin = read_text(file, _MOST_BYTES, error=DataError), file
    compiled(source)
    return Chat(source, tuple(sorted(tokens.items())), max_tokens), origin


def _named_default(templates: Any) -> str | None:
    """Return the template of a tokenizer_config.json: a text, or the one named "default"."""
    if isinstance(templates, list):
        named = [t for t in templates if isinstance(t, dict) and t.get("name") == "default"]
        templates = named[0].get("template") if named else None
    return templates if isinstance(templates, str) and templates else None
