"""On which line of a JSON text each key stands, so that a message can say which line to change."""

from __future__ import annotations

import json
import re

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|[^\s{}\[\],:"]+')


def key_lines(text: str) -> dict[str, int]:
    """Line (from 1) of every key of the object in `text`, by its path with dots between levels.

    `text` is valid JSON. Objects within lists have no such path and are left out.

    >>> key_lines('{"fp16": {\\n  "enabled": true}}')
    {'fp16': 1, 'fp16.enabled': 2}
    """
    lines: dict[str, int] = {}
    # of each open object the key that is being read, of each open list None
    open_keys: list[str | None] = []
    awaits_key = False
    line, counted = 1, 0
    for match in _TOKEN.finditer(text):
        token = match.group()
        line, counted = line + text.count("\n", counted, match.start()), match.start()
        if token in "{[":
            open_keys.append("" if token == "{" else None)
            awaits_key = token == "{"
        elif token in "}]":
            open_keys.pop()
            awaits_key = False
        elif token == ",":
            awaits_key = open_keys[-1] is not None
        elif awaits_key:
            open_keys[-1] = json.loads(token)
            awaits_key = False
            if None not in open_keys:
                lines.setdefault(".".join(key for key in open_keys if key is not None), line)
    return lines
