"""What the kernel adds to the guard of a followed script: no file outside of one folder can be changed (Landlock).

Landlock (linux/landlock.h) lets a process give up rights of its own, without being root, from Linux 5.13 on. Where it
is not there, the guard of prelude.sh stands alone.
"""
from __future__ import annotations

import ctypes
import os
import struct
from pathlib import Path

_CREATE, _ADD, _RESTRICT = 444, 445, 446  # the same numbers on all architectures
_PR_SET_NO_NEW_PRIVS = 38
_BELOW_PATH, _ASK_VERSION = 1, 1
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
# Removing and making of entries of each kind (bits 4 to 12); linking to another folder from the second version on,
# cutting files from the third.
_CHANGES = _WRITE_FILE | sum(1 << bit for bit in range(4, 13))


class Guard:
    """Restricts this process, and all it starts, to changing files below `folder`, and writing to /dev/null.

    Made in the process that starts the script, entered in the new one (preexec_fn). `works` tells whether the kernel
    can do it.
    """

    def __init__(self, folder: Path, *, wanted: bool = True) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        version = self._libc.syscall(_CREATE, None, ctypes.c_size_t(0), _ASK_VERSION)
        self.works = wanted and version >= 1
        self._rules = -1
        if not self.works:
            return
        rights = _CHANGES | (1 << 13 if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
        attributes = struct.pack("=Q", rights)
        self._rules = self._libc.syscall(_CREATE, attributes, ctypes.c_size_t(len(attributes)), 0)
        self.works = self._rules >= 0 and self._allow(folder, rights)
        self.works = self.works and self._allow(Path("/dev/null"), rights & (_WRITE_FILE | _TRUNCATE))

    def _allow(self, path: Path, rights: int) -> bool:
        try:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            rule = struct.pack("=Qi", rights, descriptor)
            return bool(self._libc.syscall(_ADD, self._rules, _BELOW_PATH, rule, 0) == 0)
        finally:
            os.close(descriptor)

    def enter(self) -> None:
        """Give up the rights. For preexec_fn: no locks, no imports."""
        if self.works:
            self._libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            self._libc.syscall(_RESTRICT, self._rules, 0)

    def close(self) -> None:
        if self._rules >= 0:
            os.close(self._rules)
