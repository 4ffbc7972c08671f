"""Bash text that acts on nothing when it is run: where it writes to, what it reads in and programs by path are wrapped.

    date > "$run/log"          date > "$(__pf_out "$run/log")"
    { date; } >> log           { date; } >> "$(__pf_out log)"
    source env.sh              source "$(__pf_source env.sh)"
    eval "$text"               eval "$(__pf_text "$text")"
    "$venv/bin/python" x.py    __pf_run "$venv/bin/python" x.py
    exec srun hostname         __pf_exec srun hostname
    [[ -f "$log" ]]            [[ -f "$(__pf_in "$log")" ]]
    ${BASH_SOURCE[0]}          ${__pf_file_3[0]}

Nothing else changes, and no line moves, so that bash's line numbers are the script's. The functions are those of
prelude.sh. A reader of bash's grammar as far as this needs it: words with their quotes and expansions, redirections,
here-documents, where a command begins. What it does not see is caught when the command is about to run.
"""
from __future__ import annotations

import re
from collections.abc import Callable

_BLANK = " \t"
_META = " \t\n;&|()<>"
# After these words another command begins; after other words of a command it does not.
_BEFORE_COMMAND = frozenset(("if", "then", "else", "elif", "do", "while", "until", "!", "{", "time", "coproc"))
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*(\[[^]]*\])?\+?=")
# Where no further word of a command stands: its end, a comment, or a redirection.
_END = re.compile(r"$|[;|)\n#]|&(?!>)")
_DESCRIPTOR = re.compile(r"(\d+|\{\w+\})(?=[<>])")
_NO_WORD = re.compile(r"$|[;&|)\n#]|(\d+|\{\w+\})?[<>]")
# A command that is found by its name alone: a function, a builtin, or a program that PATH leads to.
_PLAIN = re.compile(r"[\w.:+@%,-]+|[!{}\[\]]+|\[\[")
_FILE_TESTS = frozenset(("-e", "-f", "-d", "-r", "-s", "-w", "-x"))
_OWN_DEVICES = re.compile(r"/dev/(null|stdout|stderr|fd/\d+)")
_SOURCE = re.compile(r"\bBASH_SOURCE(\[0\])?(?![\w\[])")


class _Reader:
    """One pass over a text; `edits` are (start, stop, text) in no order, none of them within what another replaces.

    heredocs   (delimiter, tabs are taken off, quoted) of the here-documents that begin after this line
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.edits: list[tuple[int, int, str]] = []
        self.heredocs: list[tuple[str, bool, bool]] = []

    def insert(self, at: int, text: str) -> None:
        self.edits.append((at, at, text))

    def changed(self) -> str:
        """The text with its edits."""
        pieces, last = [], 0
        for start, stop, text in sorted(self.edits, key=lambda edit: edit[:2]):
            pieces += [self.text[last:start], text]
            last = stop
        return "".join([*pieces, self.text[last:]])

    # ---- commands

    def commands(self, i: int, closing: str = "") -> int:
        """Read commands from i to the end, or to `closing` (')' of a substitution); the position after it."""
        text, begins, cases, depth = self.text, True, 0, 0
        while i < len(text):
            c = text[i]
            if c in _BLANK:
                i += 1
            elif text.startswith("\\\n", i):
                i += 2
            elif c == "\n":
                i, begins = self.heredoc_bodies(i + 1), True
            elif c == "#":
                i = self.line_end(i)
            elif begins and text.startswith("((", i):
                i, begins = self.arithmetic(i + 2), False
            elif text.startswith(("&>", "<>"), i) or c in "<>":
                i = self.redirection(i)
            elif c == "(":
                depth, i, begins = depth + 1, i + 1, True
            elif c == ")":
                if depth == 0 and closing:
                    return i + 1
                depth, i, begins = max(0, depth - 1), i + 1, False
            elif cases and text.startswith((";;", ";&"), i):
                i, begins = self.pattern(i + (3 if text.startswith(";;&", i) else 2)), True
            elif c in ";&|":
                i, begins = i + 1, True
            else:
                start = i
                i = self.word(i)
                word = text[start:i]
                if word.isdigit() and text.startswith(("<", ">"), i):
                    continue  # the descriptor of a redirection
                if begins and word == "case":
                    cases, i = cases + 1, self.case_head(i)
                    continue
                if begins and word == "esac":
                    cases = max(0, cases - 1)
                elif begins:
                    i = self.command_word(start, i)
                begins = (begins and (word in _BEFORE_COMMAND or _ASSIGNMENT.match(word) is not None)) or word == "{"
        return i

    def case_head(self, i: int) -> int:
        """From the word of a case to its first command."""
        i = self.word(self.blanks(i))
        while i < len(self.text) and self.text[i] in _META:
            i += 1
        return self.pattern(self.word(i))  # after "in"

    def pattern(self, i: int) -> int:
        """To the command after the next pattern of a case, or to its esac."""
        text = self.text
        while i < len(text):
            if text[i] in " \t\n":
                i += 1
            elif text[i] == "#":
                i = self.line_end(i)
            else:
                break
        if re.compile(r"esac\b").match(text, i):
            return i
        i += text.startswith("(", i)
        while i < len(text) and text[i] != ")":
            i = i + 1 if text[i] in _META else self.word(i)
        return i + 1

    def command_word(self, start: int, end: int) -> int:
        """After the first word of a command: what it calls for; the position to go on from."""
        text = self.text
        word = text[start:end]
        if word == "[[":
            return self.condition(end)
        if word in ("[", "test"):
            return self.test(end)
        if word in ("source", "."):
            return self.wrapped_word(end, "__pf_source")
        if word == "for":
            after = self.blanks(end)
            return self.arithmetic(after + 2) if text.startswith("((", after) else end
        if word == "exec":
            return self.exec_words(start, end)
        if word == "eval" and not _NO_WORD.match(text, self.blanks(end)):
            first = i = self.blanks(end)
            while i < len(text) and not _NO_WORD.match(text, i):
                i = self.blanks(self.word(i))
            self.insert(first, '"$(__pf_text ')
            self.insert(len(text[:i].rstrip(_BLANK)), ')"')
            return i
        if not _PLAIN.fullmatch(word) and not _ASSIGNMENT.match(word) and not text.startswith("()", end):
            self.insert(start, "__pf_run ")
        return end

    def exec_words(self, start: int, i: int) -> int:
        """exec with a program, wherever its redirections stand, is __pf_exec; exec with redirections alone stays."""
        program = False
        while not _END.match(self.text, i := self.blanks(i)):
            match = _DESCRIPTOR.match(self.text, i)
            if match or self.text.startswith(("<", ">", "&>"), i):
                i = self.redirection(match.end() if match else i)
            else:
                program, i = True, self.word(i)
        if program:
            self.insert(start, "__pf_")
        return i

    def redirection(self, i: int) -> int:
        text = self.text
        for operator in ("<<<", "<<-", "<<", "&>>", "&>", "<>", ">>", ">|", ">&", "<&", "<(", ">(", "<", ">"):
            if text.startswith(operator, i):
                break
        after = i + len(operator)
        if operator in ("<(", ">("):
            return self.commands(after, ")")
        if operator in ("<<", "<<-"):
            start = self.blanks(after)
            end = self.word(start)
            delimiter = re.sub(r"[\\'\"]", "", text[start:end])
            self.heredocs.append((delimiter, operator == "<<-", delimiter != text[start:end]))
            return end
        if operator in ("<<<", "<&"):
            return self.word(self.blanks(after))
        return self.wrapped_word(after, {"<": "__pf_in", ">&": "__pf_out_or_fd"}.get(operator, "__pf_out"))

    def wrapped_word(self, i: int, function: str) -> int:
        """Wrap the word after i in a call of `function`, unless there is none, or it is a descriptor or null."""
        start = self.blanks(i)
        if start >= len(self.text) or self.text[start] in ";&|)\n#":
            return start
        if self.text.startswith(("<(", ">("), start):
            return self.commands(start + 2, ")")
        end = self.word(start)
        word = self.text[start:end]
        if not (_OWN_DEVICES.fullmatch(word) or (function == "__pf_out_or_fd" and re.fullmatch(r"\d+-?|-", word))):
            self.insert(start, f'"$({function} ')
            self.insert(end, ')"')
        return end

    def heredoc_bodies(self, i: int) -> int:
        waiting, self.heredocs = self.heredocs, []
        for delimiter, tabs, quoted in waiting:
            start = stop = i
            while i < len(self.text):
                stop, end = i, self.line_end(i)
                line = self.text[i:end]
                i = min(end + 1, len(self.text))
                if (line.lstrip("\t") if tabs else line) == delimiter:
                    break
            while not quoted and start < stop:
                start = self.inside_quotes(start)
        return i

    def condition(self, i: int) -> int:
        """To the ]] of a [[: < and > compare, words are only words. Files are looked for in the scratch folder too."""
        while i < len(self.text):
            if self.text[i] in _META:
                i += 1
                continue
            start = i
            i = self.word(i)
            if self.text[start:i] in _FILE_TESTS:
                i = self.wrapped_word(i, "__pf_in")
            elif self.text[start:i] == "]]":
                break
        return i

    def test(self, i: int) -> int:
        """The same for the words of a [ or test."""
        while not _NO_WORD.match(self.text, i := self.blanks(i)):
            start = i
            i = self.word(i)
            if self.text[start:i] in _FILE_TESTS:
                i = self.wrapped_word(i, "__pf_in")
        return i

    # ---- words

    def word(self, i: int) -> int:
        """The position after the word that begins at i."""
        text, start = self.text, i
        while i < len(text):
            c = text[i]
            if c == "(" and i > start and text[i - 1] == "=" and _ASSIGNMENT.fullmatch(text, start, i):
                i = self.array(i + 1)
            elif c in "<>" and text.startswith("(", i + 1):
                i = self.commands(i + 2, ")")
            elif c == "(" and i > start and text[i - 1] in "@?*+!":  # an extended pattern
                i = self.until(i + 1, ")", self.plain)
            elif c in _META:
                break
            else:
                i = self.plain(i)
        return max(i, start + 1)

    def plain(self, i: int) -> int:
        """One character, or the quoted or expanded piece that begins here."""
        text, c = self.text, self.text[i]
        if c == "\\":
            return i + 2
        if c == "'":
            return self.find("'", i + 1)
        if text.startswith("$'", i):
            return self.until(i + 2, "'", lambda k: k + 2 if text[k] == "\\" else k + 1)
        if c == '"':
            return self.until(i + 1, '"', self.inside_quotes)
        return self.expansion(i)

    def inside_quotes(self, i: int) -> int:
        return i + 2 if self.text[i] == "\\" else self.expansion(i)

    def expansion(self, i: int) -> int:
        text = self.text
        if text.startswith("$((", i):
            return self.arithmetic(i + 3)
        if text.startswith("$(", i):
            outer, self.heredocs = self.heredocs, []
            end = self.commands(i + 2, ")")
            self.heredocs = outer
            return end
        if text.startswith("${", i):
            return self.until(i + 2, "}", self.plain)
        if text[i] == "`":
            end = self.until(i + 1, "`", lambda k: k + 2 if text[k] == "\\" else k + 1)
            if end > len(text) or text[end - 1 : end] != "`" or end < i + 2:
                return end  # bash refuses a text that ends within
            inner = _Reader(re.sub(r"\\([`\\$])", r"\1", text[i + 1 : end - 1]))
            inner.commands(0)
            self.edits.append((i, end, f"$({inner.changed()})"))
            return end
        return i + 1

    def array(self, i: int) -> int:
        """To the ) of an array's values."""
        while i < len(self.text) and self.text[i] != ")":
            c = self.text[i]
            i = self.line_end(i) if c == "#" else i + 1 if c in _META else self.word(i)
        return i + 1

    def arithmetic(self, i: int) -> int:
        """To the )) that ends an arithmetic expression."""
        depth = 0
        while i < len(self.text):
            c = self.text[i]
            if c == "(":
                depth += 1
            elif c == ")" and depth:
                depth -= 1
            elif c == ")":
                return i + 2
            if c in "$`\"'\\":
                i = self.plain(i)
            else:
                i += 1
        return i

    # ---- small steps

    def until(self, i: int, end: str, step: Callable[[int], int]) -> int:
        while i < len(self.text) and self.text[i] != end:
            i = step(i)
        return i + 1

    def blanks(self, i: int) -> int:
        while i < len(self.text) and (self.text[i] in _BLANK or self.text.startswith("\\\n", i)):
            i += 1 if self.text[i] in _BLANK else 2
        return i

    def find(self, what: str, i: int) -> int:
        found = self.text.find(what, i)
        return len(self.text) if found < 0 else found + len(what)

    def line_end(self, i: int) -> int:
        found = self.text.find("\n", i)
        return len(self.text) if found < 0 else found


def without_writes(text: str, number: int, path: str, folders: dict[str, str] | None = None) -> str:
    """`text` with wrapped redirections and a first line that gives __pf_file_<number> the value `path`.

    folders   {name: other name}: fixed names of folders that scripts look into, such as that of network devices
    """
    reader = _Reader(text)
    reader.commands(0)
    changed = _SOURCE.sub(f"__pf_file_{number}", reader.changed())
    for name, other in (folders or {}).items():
        changed = changed.replace(name, other)
    quoted = "'" + path.replace("'", "'\\''") + "'"
    return f"__pf_file_{number}={quoted}; {changed}"
