"""The hashes of a cached folder's files: its tokens, the index of its rows. So that bytes that changed on the disk are
found.

Files are hashed after they were written, which reads them again (from memory, where they fit), and flushed before the
folder gets its name. Comparing reads every byte once more: XXH3 takes about 0.1 s a GB, so the time is that of the
disk, or of memory. 100 GB from a disk of 2 GB/s take 50 s. One process of each host does it, once a run.
"""

import json
from pathlib import Path

from filesystem import hash_file, sync_to_disk

HASHES_FILE = "hashes.json"


def write_hashes(folder: Path) -> None:
    """Write size and hash of each file of `folder`, subfolders left out. All of it is on the disk on return."""
    files = sorted(path for path in folder.iterdir() if path.is_file())
    records = {file.name: [file.stat().st_size, hash_file(file)] for file in files}
    hashes = folder / HASHES_FILE
    hashes.write_text(json.dumps(records))
    for path in (*files, hashes, folder):
        sync_to_disk(path)


def read_hashes(folder: Path) -> dict[str, str]:
    """Return file name -> hash, as the files of `folder` were written. Raises OSError and ValueError."""
    return {name: written for name, (_, written) in json.loads((folder / HASHES_FILE).read_text()).items()}


def find_changed(folder: Path, compares_bytes: bool) -> str | None:
    """Return, in words, the first file of `folder` that is not as it was written; None when all are.

    compares_bytes: read every byte; otherwise compare sizes alone. Raises OSError, ValueError and the like where the
    hashes themselves cannot be read.
    """
    for name, (size, written) in json.loads((folder / HASHES_FILE).read_text()).items():
        found = (folder / name).stat().st_size
        if found != size:
            return f"{name} has {found:,} bytes, {size:,} were written"
        if compares_bytes and hash_file(folder / name) != written:
            return f"{name}: its bytes are not those that were written"
    return None
