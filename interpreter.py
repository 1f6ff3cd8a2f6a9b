"""Checks the Python that runs a command, before anything else fails because of it."""

from __future__ import annotations

import codecs
import locale
import os
import sys
import tempfile
from multiprocessing import util

from errors import UserError

_LONGEST_SOCKET = 107  # bytes of a path (unix(7))
_BYTES_BELOW = len("/pymp-12345678/listener-12345678")  # what multiprocessing adds to the temporary folder
_SHORT_FOLDER = "/tmp"


def check_interpreter() -> None:
    """Raise UserError for a Python that reads text in another encoding than UTF-8, or has dropped docstrings. Sockets
    of worker processes are kept where their paths are short enough; other temporary files stay in TMPDIR."""
    encoding = locale.getpreferredencoding(False)
    if codecs.lookup(encoding).name != "utf-8":
        raise UserError(
            f"this Python reads and writes text as {encoding}, by its locale, and configs and data are UTF-8; set "
            "PYTHONUTF8=1, or a locale such as LC_ALL=C.UTF-8"
        )
    if sys.flags.optimize > 1:
        raise UserError(
            "python -OO (PYTHONOPTIMIZE=2) drops docstrings, which torch and transformers build code from; start it "
            "without"
        )
    if len(os.fsencode(tempfile.gettempdir())) + _BYTES_BELOW > _LONGEST_SOCKET:
        given, tempfile.tempdir = tempfile.tempdir, _SHORT_FOLDER
        try:
            util.get_temp_dir()  # which multiprocessing keeps, and hands on to its processes
        except OSError as error:
            raise UserError(
                f"TMPDIR={given} is too long for the sockets of worker processes, and {_SHORT_FOLDER} cannot be "
                f"written ({error.strerror}); set a shorter TMPDIR"
            ) from None
        finally:
            tempfile.tempdir = given
