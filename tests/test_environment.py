"""The suite does not depend on the shell that it is started from."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support.environment import hostile_environment

PRINT = """
import json, locale, os, sys
import conftest
print(json.dumps([dict(os.environ), os.umask(0), locale.getpreferredencoding(False), "torch" in sys.modules]))
"""


def test_what_a_shell_has_set_does_not_reach_a_test(tmp_path: Path) -> None:
    hostile = hostile_environment(tmp_path)
    started = os.umask(0o077)
    try:
        printed = subprocess.check_output(
            [sys.executable, "-c", PRINT],
            env={"PATH": os.environ["PATH"], **hostile},
            cwd=Path(__file__).parent,
            text=True,
        )
    finally:
        os.umask(started)
    environ, umask, encoding, imported = json.loads(printed)
    assert Path(environ.pop("HOME")).is_dir()
    assert environ == {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", "CUDA_VISIBLE_DEVICES": ""}
    assert umask == 0o022 and encoding.upper() == "UTF-8" and not imported
