"""On PYTHONPATH: a disk that is slow, or a file system that cannot do all that a local one can, as ODD_DISK says:

slow:PART:SECONDS  the first flush of a file whose path holds PART takes so long, on each rank
no-folders         folders cannot be synced
local-locks        a lock is known to one host alone; a folder of tokens is published once another host prepares it too

Each rank that met it adds a line to $ODD_DISK_LOG.
"""

import errno
import fcntl
import os
import socket
import stat
import time
from pathlib import Path

KIND, *ARGUMENTS = os.environ.get("ODD_DISK", "").split(":")
SECONDS_TO_MEET = 60
fsync, rename = os.fsync, os.rename
met = []


def note():
    met.append(True)
    with open(os.environ["ODD_DISK_LOG"], "a") as log:
        log.write(f"{socket.gethostname()} {os.environ.get('RANK')}\n")


def sync_slowly(descriptor):
    part, seconds = ARGUMENTS
    if not met and part in os.readlink(f"/proc/self/fd/{descriptor}"):
        note()
        time.sleep(float(seconds))
    fsync(descriptor)


def refuse_folders(descriptor):
    if stat.S_ISDIR(os.fstat(descriptor).st_mode):
        note()
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    fsync(descriptor)


def publish_together(source, target, **options):
    source, target = Path(source), Path(target)
    if source.name.startswith(f"{target.name}.") and source.suffix == ".tmp" and not met:
        others, deadline = f"{target.name}.*.tmp", time.monotonic() + SECONDS_TO_MEET
        while len(list(target.parent.glob(others))) < 2 and not target.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        note()
    rename(source, target, **options)


if KIND == "slow":
    os.fsync = sync_slowly
elif KIND == "no-folders":
    os.fsync = refuse_folders
elif KIND == "local-locks":
    os.rename, fcntl.flock = publish_together, lambda descriptor, operation: None
