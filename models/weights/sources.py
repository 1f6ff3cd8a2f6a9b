"""Opens the weights of a model, which are then read one layer at a time. They are a Hugging Face folder
(`hugging_face_folder.py`), a pipeline checkpoint (`pipeline_checkpoint.py`), or one of these with an adapter, which is
merged in while layers are read.

Files are memory-mapped: a tensor's bytes are read when they are used, and the whole model is never in memory. The
exception is a .bin file in the format before torch 1.6, which cannot be mapped: it is read whole when it is opened.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig

from errors import Ending, UserError
from models.adapters.folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    has_own_head,
    load_adapter_tensors,
    load_lora_config,
    read_fingerprint,
    read_tensors,
)
from models.adapters.stacks import restore_order
from models.architecture.lookup import build_layers
from models.further.table import count_trained
from models.heads.head import Labels
from models.heads.table import find_head, list_labels
from models.layers.rope_scaling import copy_positions
from models.storage.folders import measure_free
from models.storage.hub import split_revision
from models.storage.manifest import find_wrong_size
from models.storage.steps import LATEST_NAME, find_damaged_latest, has_latest, is_step, list_checkpoints, read_latest
from models.storage.tensor_files import load_json
from models.weights.adapted import AdapterFolder, MergedAdapter
from models.weights.config_file import load_config
from models.weights.edits import Edit, edit_weights
from models.weights.fingerprint import check_base, read_base_fingerprint
from models.weights.further import FurtherLayers
from models.weights.hugging_face_folder import WEIGHT_FILES, HuggingFaceFolder
from models.weights.new_head import NewHead, UntiedHead
from models.weights.pipeline_checkpoint import PipelineCheckpoint
from models.weights.resized_vocab import ResizedVocabulary, with_rows
from models.weights.source import WeightSource

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo
    from peft import LoraConfig  # imported on use: peft takes seconds

# Patterns of the files to download besides weights: configs, and what a tokenizer or a processor needs
HUB_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.bpe", "*.spm", "tokenizer*", "vocab*", "merges*")
# Patterns of subfolders that are not downloaded, since they hold the weights in other formats. In effect they match all
# subfolders whose names do not begin with "add": the chat templates in `additional_chat_templates` are downloaded.
HUB_SUBFOLDERS = ("[!a]*/*", "a[!d]*/*", "ad[!d]*/*")
# The formats of weights, in the order in which they are tried. Many repositories have several, and one is downloaded.
# Each format is (names, download, omit). names: a folder has the format if it has a file of one of these names.
# download: patterns of the files with its weights. omit: patterns of files that are not downloaded. `consolidated*` are
# weights in the format of the model's authors, next to those for transformers.
HUB_FORMATS = (
    ((*WEIGHT_FILES[:2], ADAPTER_WEIGHTS), ("*.safetensors",), ("consolidated*", "*.bin.index.json")),
    (WEIGHT_FILES[2:], ("*.bin",), ("consolidated*",)),
)

# What the system says of a full disk. The hub's downloader in Rust passes it on in an exception of another type
_FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT)))


def open_weights(name_or_path: str, trust_remote_code: bool = False, trust_checkpoint: bool = False) -> WeightSource:
    """Open the weights of a model.

    name_or_path: one of these:
      - a Hugging Face folder. It may also hold folders `global_stepN`, which the Trainer of transformers leaves there
        under DeepSpeed; they are ignored.
      - a hub id, ORG/NAME or ORG/NAME@REVISION, if no such path exists. It is downloaded into the hub's cache.
      - a pipeline checkpoint. If it has several steps, the one that the file `latest` names is opened.
      - one step of a pipeline checkpoint, its folder `global_stepN`.
      - an adapter: a peft folder, or the checkpoint of a LoRA run. The result is the base model's weights with the
        adapter merged in.
    trust_remote_code: accept a config.json that points to custom code. That code is never run.
    trust_checkpoint: accept a training checkpoint without a manifest, and an adapter that was trained on another base
    model than the one that is found.

    Raises UserError if `name_or_path` is none of these, if it cannot be downloaded or read, or if the base model of an
    adapter cannot be opened. Whether all tensors are there is checked later, by `WeightSource.check_complete`.
    """
    path = Path(name_or_path).expanduser()
    if not path.exists():
        path = _download(name_or_path)
    if path.is_file():
        raise UserError(f"{path} is a file; give the folder it is in")
    if is_step(path.name):
        return _open_checkpoint(path.parent, path.name, trust_remote_code, trust_checkpoint)
    has_weights = any((path / name).is_file() for name in (*WEIGHT_FILES, ADAPTER_WEIGHTS))
    if not has_weights and (has_latest(path) or list_checkpoints(path)):
        return _open_checkpoint(path, _choose_step(path), trust_remote_code, trust_checkpoint)
    if (path / ADAPTER_CONFIG).is_file():
        return _open_adapted(path, None, trust_remote_code, trust_checkpoint)
    return HuggingFaceFolder(path, trust_remote_code)


def _choose_step(path: Path) -> str:
    """Return the name of the step that the file `latest` in `path` names, such as "global_step20". Raises UserError if
    the file is missing or damaged, or names a step that does not exist: the newest step is suggested, but never opened
    instead."""
    fault = _find_fault_of_latest(path)
    if fault is None:
        return read_latest(path)
    newest = next((step_dir for step_dir in list_checkpoints(path) if find_wrong_size(step_dir) is None), None)
    if newest is None:
        raise UserError(f"{fault}; copy the checkpoint again")
    raise UserError(f"{fault}; give a checkpoint by its own path, such as {newest}")


def _find_fault_of_latest(path: Path) -> str | None:
    """Return, as the beginning of a message, why the file `latest` in `path` names no step; None if it names one."""
    if not has_latest(path):
        return f"{path} holds checkpoints and no file {LATEST_NAME}"
    if damage := find_damaged_latest(path):
        return damage
    if not (path / read_latest(path)).is_dir():
        return f"{path / LATEST_NAME} names '{read_latest(path)}', but there is no such folder"
    return None


def _open_checkpoint(path: Path, tag: str, trust_remote_code: bool, trust_checkpoint: bool) -> WeightSource:
    """Return the weights of a pipeline checkpoint, merged into the base model if they are an adapter's. path: the
    folder of the checkpoint. tag: the step's name, such as "global_step20"."""
    checkpoint = PipelineCheckpoint(path, tag, trust_checkpoint)
    if not checkpoint.is_adapter:
        return checkpoint
    return _open_adapted(path, checkpoint, trust_remote_code, trust_checkpoint)


def _open_adapted(
    path: Path, checkpoint: PipelineCheckpoint | None, trust_remote_code: bool, trust_checkpoint: bool
) -> WeightSource:
    """Return the base model with the adapter merged in. path: the folder with adapter_config.json. checkpoint: the
    checkpoint in `path` whose layer files hold the adapter's tensors; None for a peft folder, which has them in
    adapter_model.safetensors."""
    lora = load_lora_config(path)
    if not lora.base_model_name_or_path:
        raise UserError(
            f"{path / ADAPTER_CONFIG} has no base_model_name_or_path; set it to the model that the adapter belongs to"
        )
    _check_chain(path)
    tensors = {} if checkpoint else load_adapter_tensors(path)
    config_file = path / "config.json"
    files = checkpoint.files() if checkpoint else [path / ADAPTER_WEIGHTS, *[config_file] * config_file.is_file()]
    try:
        base = open_weights(_name_base(lora), trust_remote_code, trust_checkpoint)
    except UserError as error:
        raise UserError(
            f"{path} holds an adapter, and its base model (base_model_name_or_path) cannot be opened: {error}",
            error.ending,
        ) from None
    step_dir = checkpoint.step_dir if checkpoint else None
    base = _complete_base(base, path, step_dir, trust_remote_code, trust_checkpoint)
    layers = build_layers(base.config, base.wrapper)
    tensors = restore_order(tensors, layers, lora)
    untied = [UntiedHead()] if has_own_head(tensors, layers) else []
    read_adapter = checkpoint.read_adapter if checkpoint else read_tensors(tensors)
    adapter = MergedAdapter(path, lora, read_adapter, [path / ADAPTER_CONFIG, *files], tensors.keys())
    return edit_weights(base, [*untied, adapter])


def open_beside_adapter(
    name_or_path: str | None,
    folder: Path,
    step_dir: Path | None,
    trust_remote_code: bool = False,
    trust_checkpoint: bool = False,
) -> WeightSource:
    """Open the base model of an adapter that is put on its layers, in place of merging it in: with the head and the
    rows that the run has added which trained the adapter, and with the tokenizer and config.json of the adapter's
    folder, where it has them.

    name_or_path: of the base model, as in `open_weights`; None for that which adapter_config.json names. folder: with
    adapter_config.json. step_dir: the training checkpoint in `folder` that holds the adapter; None for a peft folder.
    Raises UserError as `open_weights` does."""
    named = _name_base(load_lora_config(folder)) if name_or_path is None else name_or_path
    base = open_weights(named, trust_remote_code, trust_checkpoint)
    base = _complete_base(base, folder, step_dir, trust_remote_code, trust_checkpoint)
    return edit_weights(base, [AdapterFolder(folder)])


def _complete_base(
    base: WeightSource, folder: Path, step_dir: Path | None, trust_remote_code: bool, trust_checkpoint: bool
) -> WeightSource:
    """Return the base model of the adapter in `folder` with the edits of the run that trained the adapter, by the
    config.json there. step_dir: see `open_beside_adapter`. Raises UserError for a model that the adapter was not
    trained on, unless `trust_checkpoint`."""
    expected = read_base_fingerprint(step_dir) if step_dir else read_fingerprint(folder)
    if expected is not None and not trust_checkpoint:
        check_base(base, expected, folder)
    if not (folder / "config.json").is_file():
        return base
    return edit_weights(base, _follow_run(base, load_config(folder, trust_remote_code)[0]))


def _follow_run(base: WeightSource, config: PretrainedConfig) -> list[Edit]:
    """Return the edits that a run made to its base model before it trained an adapter: a new head, a larger vocabulary,
    layers that predict further tokens. The run may also have changed the keys of positions, the end tokens and, for a
    head, the names of its labels and the pad token. These have no weights and are copied into `base.config`, which is
    changed in place.

    base: the base model as it was before the run. config: the config of the model that the run trained."""
    copy_positions(config, base.config)
    base.config.eos_token_id = config.eos_token_id
    edits: list[Edit] = []
    if (head := find_head(config)) is not None:
        base.config.pad_token_id = config.pad_token_id
        if find_head(base.config) is None:
            labels = Labels(list_labels(config), config.num_labels, config.problem_type)
            edits.append(NewHead(head, labels, seed=0))  # the adapter brings the trained one
        elif base.config.num_labels == config.num_labels:
            for name in ("id2label", "label2id", "problem_type"):
                setattr(base.config, name, getattr(config, name))
    if config.vocab_size > base.config.vocab_size:
        edits.append(ResizedVocabulary(with_rows(base.config, config.vocab_size)))
    if count_trained(config) and not count_trained(base.config):  # the adapter is on further layers too
        edits.append(FurtherLayers())
    return edits


def _check_chain(path: Path) -> None:
    """Raise UserError if following base_model_name_or_path from the adapter in `path` returns to a folder that was
    already visited. The base of an adapter may be another adapter, but not one that leads back to itself."""
    folder, seen = path, set()
    while (folder / ADAPTER_CONFIG).is_file():
        if folder.resolve() in seen:
            raise UserError(
                f"{path / ADAPTER_CONFIG}: base_model_name_or_path leads back to {folder}, an adapter that is its own "
                "base; set it to the model that the adapter belongs to"
            )
        seen.add(folder.resolve())
        folder = Path(str(load_json(folder / ADAPTER_CONFIG).get("base_model_name_or_path"))).expanduser()
        folder = folder.parent if is_step(folder.name) else folder


def _name_base(lora: LoraConfig) -> str:
    """Return the base model of an adapter as `open_weights` takes it: a path, ORG/NAME or ORG/NAME@REVISION."""
    name = str(lora.base_model_name_or_path)
    return name if lora.revision is None or Path(name).expanduser().exists() else f"{name}@{lora.revision}"


def _download(hub_id: str) -> Path:
    """Download a model from the hub and return its folder in the local cache. It holds weights in one format, the
    configs and the tokenizer. Subfolders are omitted, except for chat templates: gpt-oss, for example, has its weights
    in other formats there.

    hub_id: ORG/NAME or ORG/NAME@REVISION. Raises UserError if it cannot be a hub id, or if it cannot be downloaded."""
    name, revision = split_revision(hub_id)
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        raise UserError(f"model_name_or_path '{hub_id}' is not a folder here, nor could it be a hub id; check the path")
    try:
        return _download_weights(name, revision)
    except UserError:
        raise
    except Exception as error:  # offline, unknown, gated, not an id at all: each has its own type
        if any(text in str(error) for text in _FULL):
            from huggingface_hub.constants import HF_HUB_CACHE

            raise UserError(
                f"model_name_or_path '{hub_id}' could not be downloaded into {HF_HUB_CACHE}, whose disk is full; make "
                "room, or set HF_HOME to a folder on another disk",
                Ending.DISK,
            ) from None
        raise UserError(
            f"model_name_or_path '{hub_id}' is not a folder here, and could not be downloaded from the hub "
            f"({type(error).__name__}); check the path or hub id"
        ) from None


def _download_weights(name: str, revision: str | None) -> Path:
    """Download the weights of `name` in the first of `HUB_FORMATS` that the repository has, and return their folder. If
    the hub cannot be reached, it is the first format that the local cache holds. If there is none, the folder has no
    weights that a reader knows, and the reader reports that.

    revision: a branch, a tag or a commit; None for the main branch. Raises UserError where the disk has no room for
    what is left to download, and the exceptions of `huggingface_hub`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import DryRunError, LocalEntryNotFoundError

    incomplete: LocalEntryNotFoundError | None = None
    for read, files, others in HUB_FORMATS:
        wanted: dict[str, Any] = {"allow_patterns": [*HUB_FILES, *files], "ignore_patterns": [*HUB_SUBFOLDERS, *others]}
        with suppress(DryRunError):  # the hub cannot be reached, so that nothing is downloaded
            _check_room(name, snapshot_download(name, revision=revision, dry_run=True, **wanted))
        try:
            folder = Path(snapshot_download(name, revision=revision, **wanted))
        except LocalEntryNotFoundError as error:
            if getattr(error, "snapshot_path", None) is None:
                raise
            incomplete = incomplete or error  # the hub cannot be reached, and the cache may hold another format
            continue
        if any((folder / name).is_file() for name in read):
            return folder
    if incomplete is not None:
        raise incomplete
    return folder  # with weights under other names, or without any, which its reader reports


def _check_room(name: str, files: Sequence[DryRunFileInfo]) -> None:
    """Check that the disk of the hub's cache has room for those of the files that are not in it. Raises UserError."""
    from huggingface_hub.constants import HF_HUB_CACHE

    needed = sum(file.file_size or 0 for file in files if file.will_download)
    free = measure_free(Path(HF_HUB_CACHE).expanduser())
    if needed > free:
        raise UserError(
            f"model_name_or_path '{name}': {needed / 1e9:.2f} GB are to be downloaded into {HF_HUB_CACHE}, whose disk "
            f"has {free / 1e9:.2f} GB free; make room, or set HF_HOME to a folder on another disk",
            Ending.DISK,
        )
