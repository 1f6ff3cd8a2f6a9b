"""Models and tokenizers of the Hugging Face hub: `org/name`, or `org/name@REVISION` (a branch, a tag or a commit)."""

from __future__ import annotations

from pathlib import Path

from errors import UserError

SNAPSHOTS = "snapshots"  # of the hub's cache: models--ORG--NAME/snapshots/COMMIT


def split_revision(name_or_path: str) -> tuple[str, str | None]:
    """Return hub id and revision; a path that exists, and an id without a revision, come back with None.

    Raises UserError for an empty revision.
    """
    name, has_revision, revision = name_or_path.partition("@")
    if not has_revision or Path(name_or_path).expanduser().exists():
        return name_or_path, None
    if not revision:
        raise UserError(f"'{name_or_path}' ends in '@'; give a revision after it: org/name@REVISION")
    return name, revision


def describe_place(path: Path) -> str:
    """Return where a model is: `org/name@COMMIT` for a snapshot in the hub's cache, else the absolute path."""
    place = path.absolute()
    if place.parent.name == SNAPSHOTS:
        return f"{'/'.join(place.parent.parent.name.split('--')[1:])}@{place.name}"
    return str(place)
