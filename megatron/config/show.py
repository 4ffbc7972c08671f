"""The resolved configuration as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron.config.option import options_of
from megatron.config.settings import SECTIONS

if TYPE_CHECKING:
    from megatron.config.config import Config

_NAME_WIDTH = 48
_VALUE_WIDTH = 28


def render_config(config: Config) -> str:
    """Return all settings by section, with their values and origins."""
    lines = ["------------------------ arguments ------------------------"]
    for attribute, section in SECTIONS.items():
        lines.append(f"{section.title}:")  # type: ignore[attr-defined]
        for option in options_of(section):
            value = _text(getattr(getattr(config, attribute), option.name))
            dots = "." * max(3, _NAME_WIDTH - len(option.name))
            lines.append(
                f"  {option.name} {dots} {value:<{_VALUE_WIDTH}} ({config.origin(option.name)})"
            )
    lines.append("-------------------- end of arguments ---------------------")
    return "\n".join(lines)


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(str(item) for item in value)
    return str(value) if value != "" else "''"
