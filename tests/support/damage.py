"""Damaged files."""

from __future__ import annotations

import os
import random
from pathlib import Path


def damage(file: Path, kind: str, rng: random.Random) -> None:
    content = bytearray(file.read_bytes())
    if kind == "truncated":
        os.truncate(file, rng.randrange(len(content)))
    else:
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        file.write_bytes(content)
