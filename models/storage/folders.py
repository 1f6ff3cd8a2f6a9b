"""A model folder that appears complete or not at all, and the files in it other than weights.

`staged_folder` yields a temporary sibling `NAME.tmp-XXXXXXXX`; when its block ends without an error, every file is
flushed to disk and the folder gets its name in one rename. An error removes it. A killed process leaves it, unlocked,
and the next run to the same name removes it.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from filelock import BaseFileLock

from errors import Ending, UserError, choose_ending
from extension import list_model_files
from filesystem import exchange, lock_file, sync_to_disk
from models.storage.tensor_files import load_json

# The files of a tokenizer, by the names of transformers and sentencepiece.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    "emoji.json",
    "tekken.json",
)
PROMPT_TEMPLATE = "prompt_template.txt"  # next to the tokenizer: what the model's prompts were laid into in training
TEMPLATES_DIR = "additional_chat_templates"  # of a tokenizer: NAME.jinja for each further one
_SMALL_FILE = 64 * 2**20  # bytes: no tokenizer is larger, and weights under an unknown name usually are
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
# Files that are written anew, or that are about the folder that they lie in
_OF_THE_FOLDER = (
    *("config.json", "generation_config.json", "adapter_config.json", "manifest.json", "latest", "README.md"),
    "trainer_state.json",
)
_OF_THE_FOLDER_ENDING = (".py", ".log", ".out", ".lock")
VOCABULARY_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
)
LOCK_NAME = ".lock"
RECORD_NAME = ".written.json"  # in a folder that was staged: its files, by which it is known to be replaceable
_ADDED = (LOCK_NAME, RECORD_NAME, "README.md")  # an upload adds the model card
# What version 1.1 wrote into such folders, which have no record
_EARLIER = re.compile(
    r"(generation_)?config\.json|adapter_config\.json|adapter_model\.safetensors|latest|carried\.safetensors|manifest\.json"
    r"|model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json"
    r"|(image_|video_)?(pre)?processor_config\.json|feature_extractor_config\.json"
    r"|global_step0/(layer_\d+-model_states\.pt|mp_rank_00_model_states\.pt|manifest\.json)"
)


class StagedFolder:
    """The temporary folder, and a thread that flushes its files while the next one is written."""

    def __init__(self, path: Path, flusher: ThreadPoolExecutor) -> None:
        self.path = path
        self._flusher = flusher
        self._pending: list[Future[None]] = []

    def flush(self, file: Path) -> None:
        """Start to write `file`, which is complete, to the disk."""
        self._pending.append(self._flusher.submit(sync_to_disk, file))

    def flush_all(self) -> None:
        """Wait until everything in the folder is on the disk."""
        for future in self._pending:
            future.result()
        for directory, _, names in os.walk(self.path):
            for name in names:
                sync_to_disk(Path(directory, name))
            sync_to_disk(Path(directory))


@contextmanager
def staged_folder(output_dir: Path, overwrite: bool = False) -> Iterator[StagedFolder]:
    """Yield the folder to write into; it becomes `output_dir` when the block ends without an exception.

    Raises UserError where the disk or its permissions refuse, and for an `output_dir` that is in the way.
    """
    output_dir = output_dir.resolve()
    path, lock = None, None
    flusher = ThreadPoolExecutor(max_workers=1)
    try:
        output_dir.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(output_dir)
        path, lock = _make_locked_folder(output_dir)
        folder = StagedFolder(path, flusher)
        yield folder
        _record_files(path)
        folder.flush_all()
        _publish(path, output_dir, overwrite)
    except OSError as error:
        where = error.filename or path or output_dir
        raise UserError(
            f"{output_dir} cannot be written: {error.strerror or error} ({where})", choose_ending(error)
        ) from error
    finally:
        flusher.shutdown(cancel_futures=True)
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)  # the unfinished folder, or the old one that the new one replaced
        if lock is not None:
            lock.release()


def _record_files(folder: Path) -> None:
    names = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
    (folder / RECORD_NAME).write_text(json.dumps([name for name in names if name != LOCK_NAME]) + "\n")


def check_replaceable(folder: Path) -> None:
    """Check that a folder may be replaced. Raises UserError when it holds a file that neither a conversion nor an
    export of a run wrote, such as a text of a user's, or a run's checkpoint."""
    if not folder.is_dir():
        return
    is_written = _find_written(folder)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_dir() and name not in _ADDED and not is_written(name):
            raise UserError(
                f"output_dir {folder} holds {name}, which neither a conversion nor an export of a run wrote, so it is "
                "not overwritten; choose another name, or delete it yourself"
            )


def _find_written(folder: Path) -> Callable[[str], bool]:
    """Return whether a file, by its path in `folder`, was written with it."""
    try:
        return set(json.loads((folder / RECORD_NAME).read_text())).__contains__
    except (OSError, ValueError, TypeError):
        modules = {f"{name.split('.')[0]}.py" for name in find_custom_tokenizer(folder)}
        known = {*TOKENIZER_FILES, *modules, *list_model_files()}
        return lambda name: name in known or _EARLIER.fullmatch(name) is not None


@contextmanager
def hold_run_lock(output_dir: Path) -> Iterator[None]:
    """Keep a run from writing into the folder that `output_dir` is in, if it is a run's. Raises UserError when one
    does."""
    file = output_dir.resolve().parent / LOCK_NAME
    try:
        lock = lock_file(file) if file.is_file() else None
    except BlockingIOError:
        raise UserError(
            f"output_dir {output_dir} is in the folder of a run that has not ended; choose another name"
        ) from None
    except OSError:  # a file system without locks, where no run starts
        lock = None
    with lock or nullcontext():
        yield


def check_output_dir(
    output_dir: Path, overwrite: bool, source_dir: Path | None = None, files: Iterable[Path] = ()
) -> None:
    """Check that `output_dir` can be written. files: what else is read. Raises UserError when it exists, or is not a
    model folder, or overlaps the source."""
    output = output_dir.resolve()
    if source_dir is not None:
        source = source_dir.resolve()
        if output == source or source in output.parents or output in source.parents:
            raise UserError(
                f"output_dir {output_dir} overlaps with the source {source_dir}; choose a folder next to it"
            )
    for file in files:
        if output in (*file.absolute().parents, *file.resolve().parents):
            raise UserError(f"output_dir {output_dir} holds {file}, which is read; choose another name")
    if not output.exists():
        return
    if not output.is_dir():
        raise UserError(f"output_dir {output_dir} is a file; give the name of a folder")
    if not overwrite:
        raise UserError(f"output_dir {output_dir} exists; pass --overwrite to replace it, or choose another name")
    is_model = any((output / name).is_file() for name in ("config.json", "adapter_config.json"))
    if any(output.iterdir()) and not is_model:
        raise UserError(
            f"output_dir {output_dir} holds files but no config.json: it is not a model folder, so it is not "
            "overwritten"
        )


def check_disk_space(output_dir: Path, needed: int) -> None:
    """Check that the disk of `output_dir` has `needed` bytes free. Raises UserError otherwise."""
    free = measure_free(output_dir)
    if free < needed:
        raise UserError(
            f"output_dir {output_dir} needs {needed / 1e9:.2f} GB and its disk has {free / 1e9:.2f} GB free; "
            "make room or choose another",
            Ending.DISK,
        )


def measure_free(folder: Path) -> int:
    """Return the free bytes of the disk on which a folder is, or will be."""
    existing = next(parent for parent in (folder.resolve(), *folder.resolve().parents) if parent.exists())
    return shutil.disk_usage(existing).free


def has_tokenizer(path: Path) -> bool:
    """Return whether the folder has a tokenizer's vocabulary."""
    return any((path / name).is_file() for name in VOCABULARY_FILES)


def copy_small_files(source_dir: Path, target_dir: Path, with_tokenizer: bool = True) -> None:
    """Copy, byte by byte, the files next to a model's weights that the target lacks: those of its tokenizer and its
    processor, and whatever else lies there, except weights, their index, code and what is written anew.

    with_tokenizer: False where the target has another tokenizer, or the same one with changes.
    """
    for file in list_small_files(source_dir):
        name = file.relative_to(source_dir)
        is_tokenizer_file = name.name in TOKENIZER_FILES or len(name.parts) > 1
        if (with_tokenizer or not is_tokenizer_file) and not (target_dir / name).exists():
            (target_dir / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target_dir / name)


def list_small_files(folder: Path) -> list[Path]:
    """Return the files of a model's folder that a copy of the model needs besides its weights and its config."""
    if not folder.is_dir():
        return []
    modules = {f"{name.split('.')[0]}.py" for name in find_custom_tokenizer(folder)}
    files = [file for file in folder.iterdir() if file.name in modules or _is_carried(file)]
    return sorted([*files, *(folder / TEMPLATES_DIR).glob("*.jinja")])


def _is_carried(file: Path) -> bool:
    if file.name.startswith(".") or file.name in (*_OF_THE_FOLDER, *list_model_files()):
        return False
    if file.name.endswith((*_WEIGHT_SUFFIXES, *_OF_THE_FOLDER_ENDING)):
        return False
    return file.is_file() and file.stat().st_size <= _SMALL_FILE


def copy_model_files(source_dir: Path, target_dir: Path) -> None:
    """Copy, byte by byte, the files next to a model's weights that extensions make; those that are there."""
    for name in list_model_files():
        if (source_dir / name).is_file():
            (target_dir / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source_dir / name, target_dir / name)


def find_custom_tokenizer(path: Path) -> list[str]:
    """Return the classes outside of transformers ("module.Class") that the folder's tokenizer uses."""
    file = path / "tokenizer_config.json"
    auto_map = load_json(file).get("auto_map") if file.is_file() else None
    if auto_map is None:
        return []
    classes = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
    names = [name for entry in classes for name in (entry if isinstance(entry, list) else [entry])]
    return sorted({str(name) for name in names if name})


def remove_leftovers(output_dir: Path) -> None:
    """Remove the temporary folders of killed conversions to `output_dir`: those that no living process has locked."""
    pattern = re.compile(re.escape(output_dir.name) + r"\.tmp-[0-9a-f]{8}")
    for path in [path for path in output_dir.parent.iterdir() if pattern.fullmatch(path.name)]:
        try:
            lock = _lock(path)
        except OSError:  # another process is writing it, or it cannot be known
            continue
        shutil.rmtree(path, ignore_errors=True)
        lock.release()


def _make_locked_folder(output_dir: Path) -> tuple[Path, BaseFileLock | None]:
    """Create a temporary sibling, and lock it for the life of this process (None: a disk without locks)."""
    while True:
        path = output_dir.with_name(f"{output_dir.name}.tmp-{secrets.token_hex(4)}")
        path.mkdir()
        try:
            return path, _lock(path)
        except (BlockingIOError, FileNotFoundError):  # another run took it for a leftover before it was locked
            continue
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
            return path, None


def _lock(path: Path) -> BaseFileLock:
    """Lock the folder. Raises BlockingIOError when another process holds the lock.

    The lock is a file in the folder and not the folder itself: NFS locks only files that are open for writing.
    """
    return lock_file(path / LOCK_NAME)


def _publish(path: Path, output_dir: Path, overwrite: bool) -> None:
    """Give the complete folder its name. The lock file is removed last: without it another run could take the folder
    for a leftover."""
    if not output_dir.exists():
        os.rename(path, output_dir)
    elif overwrite:
        exchange(path, output_dir)
    else:
        raise UserError(
            f"output_dir {output_dir} appeared while it was being written; another conversion wrote it first"
        )
    (output_dir / LOCK_NAME).unlink(missing_ok=True)
    sync_to_disk(output_dir)
    sync_to_disk(output_dir.parent)


def drop_from_memory(file: Path) -> None:
    """Drop the pages of a flushed file from the page cache, so that it is read from the disk. Does nothing where that
    is not possible."""
    with open(file, "rb") as stream, suppress(OSError):
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
