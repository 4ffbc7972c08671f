"""Durations in Slurm's notation."""

from __future__ import annotations

import re

_FORMS = re.compile(r"(?:(?P<days>\d{1,9})-)?(?P<parts>\d{1,9}(?::\d{1,9}){0,2})")


def duration_s(text: str) -> int | None:
    """Return, in seconds, a duration written in one of the forms accepted by sbatch --time.

    The forms are D-HH:MM:SS, D-HH:MM, D-HH, HH:MM:SS, MM:SS and whole minutes. Return None for
    anything else, such as UNLIMITED or INVALID. The first number may have up to nine digits. In the
    others, minutes and seconds must be below 60, and hours below 24.

    >>> duration_s("1-02:00:30"), duration_s("90:00"), duration_s("120"), duration_s("UNLIMITED")
    (93630, 5400, 7200, None)
    """
    match = _FORMS.fullmatch(text.strip())
    if match is None:
        return None
    fields = [int(value) for value in match["parts"].split(":")]
    if any(value >= 60 for value in fields[1:]):
        return None
    if match["days"] is not None:
        if fields[0] >= 24:
            return None
        hours, minutes, seconds = (*fields, 0, 0)[:3]
        return 86400 * int(match["days"]) + 3600 * hours + 60 * minutes + seconds
    if len(fields) == 1:
        return 60 * fields[0]
    seconds = 0
    for value in fields:
        seconds = 60 * seconds + value
    return seconds


def show_duration(seconds: float) -> str:
    """Return a duration in Slurm's notation, rounded to whole seconds.

    >>> show_duration(93630.4), show_duration(5), show_duration(-5)
    ('1-02:00:30', '0:05', '-0:05')
    """
    total = round(abs(seconds))
    days = total // 86400
    hours = total // 3600 % 24
    minutes = total // 60 % 60
    rest = total % 60
    sign = "-" if seconds < 0 else ""
    if days:
        return f"{sign}{days}-{hours:02}:{minutes:02}:{rest:02}"
    return f"{sign}{hours}:{minutes:02}:{rest:02}" if hours else f"{sign}{minutes}:{rest:02}"
