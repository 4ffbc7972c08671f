"""For prelude.sh: copies of texts that can be run without acting. Started as a program, without the package."""
from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":  # without the package, which takes longer to import
    sys.path.insert(0, str(Path(__file__).parent))
    from shell_text import without_writes  # type: ignore[import-not-found]
else:
    from megatron.preflight.check.shell_text import without_writes


def write_copy(scratch: Path, text: str, name: str) -> Path:
    """A copy of `text` that can be run, numbered; its name, for messages and BASH_SOURCE, lies beside it."""
    folder = scratch / "copies"
    number = 1
    while True:
        copy = folder / f"{number}.sh"
        try:
            descriptor = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            number += 1
            continue
        break
    folders = {"/sys/class/net": str(scratch / "net")} if (scratch / "net").is_dir() else {}
    with os.fdopen(descriptor, "w", encoding="utf-8", errors="surrogateescape") as file:
        file.write(without_writes(text, number, name, folders))
    copy.with_suffix(".name").write_text(name, encoding="utf-8", errors="surrogateescape")
    return copy


def main(arguments: list[str]) -> None:
    scratch, what, *rest = Path(arguments[0]), *arguments[1:]
    if what == "--text":
        print(without_writes(" ".join(rest), 0, "eval"), end="")
    elif what == "-":
        print(write_copy(scratch, sys.stdin.read(), rest[0]), end="")
    else:
        text = Path(what).read_text(encoding="utf-8", errors="surrogateescape")
        print(write_copy(scratch, text, os.path.abspath(rest[0])), end="")


if __name__ == "__main__":
    main(sys.argv[1:])
