"""Renders conversations as text, and determines which parts of the text are in the loss.

A line of JSON has either {"messages": [{"role", "content"}, ...]}, which a chat template turns into
text, or {"prompt", "completion"}, which are concatenated. The assistant's turns and completions are
in the loss; everything else is only context.

A template is Jinja as in Hugging Face's tokenizer_config.json: the same variables, options and
sandbox as in transformers, except strftime_now, so that the text does not depend on the date. Text
between {% generation %} and {% endgeneration %} is in the loss. In a template without these marks,
the loss covers what the loop over the messages writes for an assistant turn, less the header that
add_generation_prompt writes. A template without such a loop is rendered up to the start and up to
the end of each assistant turn, and the difference is in the loss; both renderings must be prefixes
of the full text.

A template other than the built-in one runs in a process with CPU-time and memory limits.

A token is in the loss if one of its characters is. A token without characters, such as
end-of-document, is treated like the token before it.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from megatron.data.added_tokens import named_tokens
from megatron.data.tokenizer import Tokenizer
from megatron.errors import ConfigError, DataError
from megatron.limited import LimitedProcess
from megatron.untrusted import read_json, read_text

DEFAULT = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '\\n' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
_MOST_BYTES = 1 << 24
# Unicode noncharacters, which are not used in interchanged text.
_BEGIN = "\ufdd0"
_END = "\ufdd1"
_TURN = "\ufdd2"
_NAMED = "\ufdd3"
_LEFT = "\ufdd4"
_MARKS = (_BEGIN, _END, _TURN, _NAMED, _LEFT)
_NUMBERS = "numbers of messages"  # not an identifier, so no template can refer to it
_MARKED = re.compile(r"\{%[-+]?\s*generation\b")
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Conversation:
    """A text and the ranges of its characters that are in the loss, in order.

    around   whether to add the special tokens (such as BOS) that the tokenizer adds to every text
    """

    text: str
    in_loss: Spans
    around: bool


@dataclass(frozen=True)
class Chat:
    """Conversion of lines to conversations.

    template    source of the chat template
    tokens      names and texts of special tokens, for the template
    max_tokens  maximum length of a conversation in tokens; a longer one is bad input. None: no
                limit
    tool_use    source of the template for conversations with tools; None: `template`
    """

    template: str = DEFAULT
    tokens: tuple[tuple[str, str], ...] = ()
    max_tokens: int | None = None
    tool_use: str | None = None

    def read(self, document: dict[str, Any]) -> Conversation:
        """Return the conversation of a line.

        Raises DataError if the line has another form, the template fails or nothing is in the loss.
        """
        if "messages" in document:
            text, in_loss = self._render(document["messages"], document.get("tools"))
            conversation = Conversation(text, in_loss, around=False)
        elif "prompt" in document and "completion" in document:
            prompt = document["prompt"]
            completion = document["completion"]
            if not isinstance(prompt, str) or not isinstance(completion, str):
                raise DataError("'prompt' and 'completion' must both be strings")
            text = prompt + completion
            conversation = Conversation(text, ((len(prompt), len(text)),), around=True)
        else:
            raise DataError(
                "neither 'messages' nor both 'prompt' and 'completion': the keys are "
                f"{sorted(document)!s:.300}"
            )
        try:
            conversation.text.encode()
        except UnicodeEncodeError:
            raise DataError("the text has a lone surrogate, which is not a character") from None
        if not any(start < stop for start, stop in conversation.in_loss):
            raise DataError("no text in an assistant turn or a completion: nothing is in the loss")
        return conversation

    def encode(
        self, conversation: Conversation, tokenizer: Tokenizer, *, append_eod: bool
    ) -> tuple[list[int], npt.NDArray[np.uint8]]:
        """Return the ids of a conversation, and for each id 1 if it is in the loss, otherwise 0.

        Raises DataError if the conversation is too long or no token is in the loss.
        """
        ids, places = tokenizer.encode_with_offsets(conversation.text, special=conversation.around)
        inside = np.zeros(len(conversation.text) + 1, np.int64)
        for start, stop in conversation.in_loss:
            inside[start + 1 : stop + 1] = 1
        before = np.cumsum(inside)
        marks = before[places[:, 1]] > before[places[:, 0]]
        with_text = np.flatnonzero(places[:, 1] > places[:, 0])
        # for each token, the last one at or before it that has characters; -1 if there is none
        last = np.searchsorted(with_text, np.arange(len(ids)), side="right") - 1
        marks = np.where(last >= 0, marks[with_text[last]], False) if len(with_text) else marks
        if append_eod and len(ids) and ids[-1] != tokenizer.eod:
            ids = [*ids, tokenizer.eod]
            marks = np.append(marks, marks[-1])
        if self.max_tokens is not None and len(ids) > self.max_tokens:
            raise DataError(f"{len(ids)} tokens, more than --max-tokens {self.max_tokens}")
        if not marks.any():
            raise DataError("no token in an assistant turn or a completion: nothing is in the loss")
        return ids, marks.astype(np.uint8)

    def _render(self, messages: Any, tools: Any) -> tuple[str, Spans]:
        if (
            not isinstance(messages, list)
            or not messages
            or not all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)
        ):
            raise DataError(
                "'messages' must be a list of one or more objects, each with a string as 'role'"
            )
        try:
            written = json.dumps([messages, tools], ensure_ascii=False)
            size = len(written.encode(errors="replace"))
        except RecursionError:
            raise DataError("'messages' or 'tools' are nested too deeply") from None
        if any(mark in written for mark in _MARKS):
            raise DataError(
                "'messages' or 'tools' contain one of U+FDD0 to U+FDD4, which are not characters"
            )
        if tools is not None and self.tool_use is not None:
            return replace(self, template=self.tool_use, tool_use=None)._render(messages, tools)
        if self.template == DEFAULT:
            return rendered(self, messages, tools)
        text, spans = _process_of(self).ask((messages, tools), size)
        return text, tuple((start, stop) for start, stop in spans)


@functools.cache
def _process_of(chat: Chat) -> LimitedProcess:
    about = {"template": chat.template, "tokens": chat.tokens}
    return LimitedProcess(f"{__name__}:serve", about, "the chat template", len(chat.template))


def serve(about: dict[str, Any]) -> Callable[[Any], tuple[str, Spans] | None]:
    """Return the function that the child process applies to (messages, tools), or to None.

    None only checks the template. Raises ConfigError for an invalid template.
    """
    chat = Chat(**about)
    compiled(chat.template)
    return lambda request: None if request is None else rendered(chat, *request)


def rendered(chat: Chat, messages: list[dict[str, Any]], tools: Any) -> tuple[str, Spans]:
    """Return the text of a conversation, and its ranges of characters in the loss.

    Raises DataError if the template fails or the ranges cannot be determined.
    """
    messages = [_with_reasoning(message) for message in messages]
    text, spans = _split_at_marks(_text(chat, messages, tools))
    if _MARKED.search(chat.template):
        return text, spans
    if (turns := _turns(chat, text, messages, tools)) is not None:
        return text, turns
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = _text(chat, messages[:i], tools, generate=True)
        stop = _text(chat, messages[: i + 1], tools)
        if not (text.startswith(stop) and stop.startswith(start)):
            raise DataError(
                f"message {i}: the chat template writes it or its header differently when the "
                "text ends there, so its position is unknown: put {% generation %} and "
                "{% endgeneration %} around the assistant's turns in the template"
            )
        spans += ((len(start), len(stop)),)
    return text, spans


def _turns(chat: Chat, text: str, messages: list[dict[str, Any]], tools: Any) -> Spans | None:
    """Return the ranges of the assistant's turns in a text, from the template's loop over messages.

    A turn is what one iteration of the loop writes, less the header that add_generation_prompt
    writes. If the last message is the assistant's, text after the loop belongs to its turn. None if
    no loop writes each turn exactly once, or if the marks change the rendered text.
    """
    ranges = _passes(_text(chat, messages, tools, turns=True), text)
    numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if ranges is None or any(i not in ranges for i in numbers):
        return None
    if not numbers:
        return ()
    # only up to the first assistant turn: a header may depend on the preceding message
    context = messages[: numbers[0]] or messages
    ahead = _text(chat, context, tools, generate=True)
    before = _passes(_text(chat, context, tools, generate=True, turns=True), ahead)
    if before is None:
        return None
    beginning = ahead[max((stop for _, stop in before.values()), default=0) :]
    spans = list[tuple[int, int]]()
    for i in numbers:
        start, stop = ranges[i]
        pairs = enumerate(zip(beginning, text[start:stop], strict=False))
        shared = next((at for at, (a, b) in pairs if a != b), min(len(beginning), stop - start))
        spans.append((start + shared, stop))
    if numbers[-1] == len(messages) - 1:
        spans[-1] = spans[-1][0], len(text)
    return tuple(spans)


def _passes(marked: str, text: str) -> dict[int, tuple[int, int]] | None:
    """Return the range in `text` that a loop wrote for each message.

    None if a message has several ranges, or if `marked` without its marks is not `text`.
    """
    ranges = dict[int, tuple[int, int]]()
    bare = list[str]()
    opened = list[Any]()
    length = 0
    for fragment in re.split(f"({_TURN}[0-9]*{_NAMED}|{_LEFT})", marked):
        if fragment[:1] == _TURN:
            opened.append((fragment[1:-1], length))
        elif fragment == _LEFT:
            if not opened:
                return None
            number, start = opened.pop()
            if number and start < length:
                if int(number) in ranges:
                    return None
                ranges[int(number)] = start, length
        else:
            bare.append(fragment)
            length += len(fragment)
    return None if opened or "".join(bare) != text else ranges


def _text(
    chat: Chat, messages: Sequence[Any], tools: Any, *, generate: bool = False, turns: bool = False
) -> str:
    """Return the rendered text. Raises DataError if the template fails.

    With `turns`, what each iteration of a loop over the messages writes is between marks.
    """
    try:
        return compiled(chat.template, turns).render(
            {
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": generate,
                **dict(chat.tokens),
                _NUMBERS: {id(message): i for i, message in enumerate(messages)},
            }
        )
    except MemoryError:
        raise
    except Exception as error:  # a template may fail in any way on an unexpected message
        raise DataError(
            f"the chat template fails: {type(error).__name__}: {error!s:.300}"
        ) from error


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with its reasoning also as `thinking` and `reasoning_content`.

    Templates read either name. transformers does the same.
    """
    names = ("reasoning_content", "reasoning", "thinking")
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _Generation(Extension):
    """The tag {% generation %}: puts marks around what it contains."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's name and type)

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


class _Turns(Extension):
    """Puts marks around what each iteration of a loop writes.

    The first mark has the number of the message that the iteration is for, if it is for one.
    """

    def around(self, tree: nodes.Template) -> nodes.Template:
        for loop in tree.find_all(nodes.For):
            if isinstance(loop.target, nodes.Name):
                item = nodes.Name(loop.target.name, "load")
                enter = nodes.Output([self.call_method("_enter", [item])])
                leave = nodes.Output([nodes.TemplateData(_LEFT)])
                loop.body = [enter, *loop.body, leave]
        return tree

    @pass_context
    def _enter(self, context: Any, item: Any) -> str:
        return f"{_TURN}{context.parent[_NUMBERS].get(id(item), '')}{_NAMED}"


class _Environment(ImmutableSandboxedEnvironment):
    turns = False

    def _parse(self, source: str, name: Any, filename: Any) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        around: Any = self.extensions[_Turns.identifier]
        return around.around(tree) if self.turns else tree


class _Namespace(Namespace):
    """Namespace without names that begin with an underscore, as in transformers."""

    def __init__(*args: Any, **names: Any) -> None:
        self, *positional = args
        values = dict(*positional, **names)
        for name in values:
            _Namespace._check(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        Namespace.__setitem__(self, name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace has no {name!r}")


@functools.cache
def compiled(template: str, turns: bool = False) -> Template:
    """Return a compiled template. Raises ConfigError, with the line number, if it is invalid."""

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    def fail(message: str) -> None:
        raise TemplateError(message)

    environment = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, _Turns, LoopControlExtension],
    )
    environment.turns = turns
    environment.filters["tojson"] = to_json
    environment.globals |= {"raise_exception": fail, "namespace": _Namespace}
    try:
        return environment.from_string(template)
    except MemoryError:
        raise
    except Exception as error:  # also Python's own, for code that its compiler rejects
        line = getattr(error, "lineno", None) if isinstance(error, TemplateError) else None
        raise ConfigError(
            f"the chat template cannot be used: {type(error).__name__}: {error!s:.300}"
            + (f" (line {line})" if line else "")
        ) from None


def _split_at_marks(marked: str) -> tuple[str, Spans]:
    """Remove the marks from a text; return the text and the ranges that were between marks."""
    texts = list[str]()
    spans = list[tuple[int, int]]()
    length = 0
    start: int | None = None
    for fragment in re.split(f"([{_BEGIN}{_END}])", marked):
        if fragment == _BEGIN and start is None:
            start = length
        elif fragment == _END and start is not None:
            spans.append((start, length))
            start = None
        elif fragment in (_BEGIN, _END):
            raise DataError("the chat template has {% generation %} within {% generation %}")
        else:
            texts.append(fragment)
            length += len(fragment)
    return "".join(texts), tuple(spans)


def find_chat(
    file: str | None, tokenizer_model: str | None, max_tokens: int | None = None
) -> tuple[Chat, str]:
    """Return a Chat, and the origin of its template for messages.

    The template is that of --chat-template (`file`), of the tokenizer's folder, or the built-in
    one. `tokenizer_model` is the path of an HFTokenizer, whose folder may have named templates, as
    in transformers: "default", and "tool_use" for conversations with tools. Raises DataError for
    files that cannot be read, ConfigError for an invalid template.
    """
    templates = {"default": DEFAULT}
    origin = "the built-in one"
    tokens = dict[str, str]()
    if tokenizer_model is not None:
        path = Path(tokenizer_model)
        folder = path if path.is_dir() else path.parent
        tokens = named_tokens(folder / "tokenizer.json")
        if (beside := _templates(folder))[0]:
            templates, origin = beside
    if file is not None:
        templates = {"default": read_text(file, _MOST_BYTES, error=DataError)}
        origin = file
    if "default" not in templates:
        raise DataError(
            f"{origin}: none of its chat templates ({', '.join(sorted(templates))}) is named "
            "default: write the one to use to a file, and pass that file as --chat-template"
        )
    source = templates["default"]
    chat = Chat(source, tuple(sorted(tokens.items())), max_tokens, templates.get("tool_use"))
    with_tools = replace(chat, template=chat.tool_use or DEFAULT, tool_use=None)
    for name, each in (("default", chat), ("tool_use", with_tools)):
        if each.template != DEFAULT:
            try:
                _process_of(each).ask(None, 0)
            except (ConfigError, DataError) as error:
                raise type(error)(f"{origin}, template {name}: {error}") from None
    return chat, origin


def _templates(folder: Path) -> tuple[dict[str, str], str]:
    """Return the chat templates of a tokenizer's folder by name, and the path they are from."""
    main = folder / "chat_template.jinja"
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if main.is_file():
        files["default"] = main
    if files:
        texts = {
            name: read_text(path, _MOST_BYTES, error=DataError) for name, path in files.items()
        }
        return texts, str(files.get("default", folder / "additional_chat_templates"))
    file = folder / "tokenizer_config.json"
    settings = read_json(file, _MOST_BYTES, error=DataError, bits=128) if file.is_file() else {}
    listed = settings.get("chat_template") or []
    if isinstance(listed, str):
        return {"default": listed}, str(file)
    if not isinstance(listed, list) or not all(
        isinstance(one, dict) and all(isinstance(one.get(k), str) for k in ("name", "template"))
        for one in listed
    ):
        raise DataError(
            f"{file}: chat_template is neither a string nor a list of objects with a name and a "
            "template"
        )
    return {one["name"]: one["template"] for one in listed}, str(file)
