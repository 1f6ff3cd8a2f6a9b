"""Random damage to JSON files, as in folders that a stranger wrote."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

ODD = [0, -1, 3, 10**6, 10**9, 10**18, 0.5, 1e300, True, None, "", "x", "llama", [], [1, "a"], {}, {"a": {"b": []}}]


def mutate(file: Path, rng: random.Random) -> None:
    """Change one to three fields of a JSON file, at any depth, to odd values."""
    fields = json.loads(file.read_text())
    for _ in range(rng.randint(1, 3)):
        place: Any = fields
        while True:
            name = rng.choice([*place, "extra"]) if isinstance(place, dict) else rng.randrange(len(place))
            inner = place.get(name) if isinstance(place, dict) else place[name]
            if not (isinstance(inner, dict | list) and inner and rng.random() < 0.7):
                break
            place = inner
        place[name] = rng.choice(ODD)
    file.write_text(json.dumps(fields))
