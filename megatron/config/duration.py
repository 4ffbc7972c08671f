"""Durations in Slurm's notation."""

from __future__ import annotations

import re

_FORMS = re.compile(r"(?:(?P<days>\d{1,9})-)?(?P<parts>\d{1,9}(?::\d{1,9}){0,2})")


def duration_s(text: str) -> int | None:
    """Return the seconds of a duration in one of the forms of sbatch --time.

    They are D-HH:MM:SS, D-HH:MM, D-HH, HH:MM:SS, MM:SS and whole minutes. None for anything else,
    such as UNLIMITED or INVALID. The first part may have nine digits. Minutes and seconds are below
    60, hours after days below 24.

    >>> duration_s("1-02:00:30"), duration_s("90:00"), duration_s("120"), duration_s("UNLIMITED")
    (93630, 5400, 7200, None)
    """
    found = _FORMS.fullmatch(text.strip())
    if found is None:
        return None
    parts = [int(part) for part in found["parts"].split(":")]
    if any(part >= 60 for part in parts[1:]):
        return None
    if found["days"] is not None:
        if parts[0] >= 24:
            return None
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        return 86400 * int(found["days"]) + 3600 * hours + 60 * minutes + seconds
    if len(parts) == 1:
        return 60 * parts[0]
    seconds = 0
    for part in parts:
        seconds = 60 * seconds + part
    return seconds


def show_duration(seconds: float) -> str:
    """Return seconds in Slurm's notation.

    >>> show_duration(93630.4), show_duration(5), show_duration(-5)
    ('1-02:00:30', '0:05', '-0:05')
    """
    whole = round(abs(seconds))
    days = whole // 86400
    hours = whole // 3600 % 24
    minutes = whole // 60 % 60
    rest = whole % 60
    sign = "-" if seconds < 0 else ""
    if days:
        return f"{sign}{days}-{hours:02}:{minutes:02}:{rest:02}"
    return f"{sign}{hours}:{minutes:02}:{rest:02}" if hours else f"{sign}{minutes}:{rest:02}"
