"""The one exception that means "the user can fix this".

Whatever a person can cause (a key, a file, a folder, a number of GPUs) raises `UserError`; its message is one line that
names the key, the file and line, or the tensor, and says what to do. The entry points print that line without a stack
trace. Everything else is a bug and keeps its trace, in the log of its rank. `docs/errors.md` lists all messages.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum


class Ending(IntEnum):
    """Why a process ends before its work is done, as its exit code; those above 63 are of BSD's sysexits.h. Signal N is
    128 + N."""

    MISTAKE = 1  # of the user
    EXCEPTION = 70  # unexpected (EX_SOFTWARE)
    DISK = 74  # full, or failing (EX_IOERR)
    LOST_RANK = 75  # a rank has ended without a message or is stuck; the command may succeed again (EX_TEMPFAIL)


class UserError(ValueError):
    """A mistake outside the code. The message names what is wrong and the way out."""

    def __init__(self, message: str, ending: Ending = Ending.MISTAKE) -> None:
        """ending: what it ends the process as."""
        super().__init__(message)
        self.ending = ending


def choose_ending(error: OSError) -> Ending:
    """Return what a message that explains an error of a file system ends a process as."""
    return Ending.DISK if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else Ending.MISTAKE


def explain_refusal(error: OSError) -> UserError | None:
    """Returns the UserError for a file without permission or a full disk, or None for any other error, which is a
    bug."""
    where = error.filename or "a file"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return UserError(f"{where}: {error.strerror}; ask its owner, or take another path")
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"{where} cannot be written: {error.strerror}; make room, then continue with resume=auto", Ending.DISK
        )
    return None


@contextmanager
def exit_with_message() -> Iterator[None]:
    """Ends a command of one process with the line of a UserError, or of what the disk or its owner refuse."""
    try:
        yield
    except (UserError, OSError) as error:
        known = error if isinstance(error, UserError) else explain_refusal(error)
        if known is None:
            raise
        sys.exit(f"error: {known}")
