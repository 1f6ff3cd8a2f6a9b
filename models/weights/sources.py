"""Opens weights, which are then read one layer at a time, in either form: a Hugging Face folder
(`hugging_face_folder.py`) or a pipeline checkpoint (`pipeline_checkpoint.py`), with or without an adapter.

Both are opened memory-mapped: a tensor's bytes are read when they are used, and nothing ever holds the whole model.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from transformers import PretrainedConfig

from errors import UserError
from models.adapters.folder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    has_own_head,
    load_adapter_tensors,
    load_lora_config,
    read_fingerprint,
    read_tensors,
)
from models.architecture.lookup import build_layers
from models.further.table import count_trained
from models.heads.head import Labels
from models.heads.table import find_head, list_labels
from models.layers.rope_scaling import copy_positions
from models.storage.hub import split_revision
from models.storage.manifest import find_wrong_size
from models.storage.steps import LATEST_NAME, find_damaged_latest, has_latest, is_step, list_checkpoints, read_latest
from models.storage.tensor_files import load_json
from models.weights.adapted import MergedAdapter
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
    from peft import LoraConfig  # imported on use: peft takes seconds

# What a tokenizer, a processor and the converter may need besides weights
HUB_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.bpe", "*.spm", "tokenizer*", "vocab*", "merges*")
# Subfolders hold weights in other formats; all but those that begin with the letters of `TEMPLATES_DIR` are left out
HUB_SUBFOLDERS = ("[!a]*/*", "a[!d]*/*", "ad[!d]*/*")
# Many repositories have weights in several formats, of which one is downloaded, the first that the reader takes: the
# names of which one is there then, patterns of its files, and of what is left out. `consolidated*` are the files of the
# model's authors, next to those for transformers.
HUB_FORMATS = (
    ((*WEIGHT_FILES[:2], ADAPTER_WEIGHTS), ("*.safetensors",), ("consolidated*", "*.bin.index.json")),
    (WEIGHT_FILES[2:], ("*.bin",), ("consolidated*",)),
)


def open_weights(name_or_path: str, trust_remote_code: bool = False, trust_checkpoint: bool = False) -> WeightSource:
    """Open a Hugging Face folder, a hub id, a pipeline checkpoint (of several steps the one that `latest` names), or
    one `global_stepN`. For an adapter (a peft folder, or the checkpoint of a LoRA run) return the base model's weights
    with the adapter merged in. A folder with weights and a checkpoint of something else next to them, as the Trainer of
    transformers leaves it under DeepSpeed, is opened as its weights.

    trust_checkpoint: accept a training checkpoint without a manifest. Raises UserError for anything else.
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
    """Return the step that `latest` names. Raises UserError where it names none that is there: which weights are used
    is not guessed."""
    fault = _find_fault_of_latest(path)
    if fault is None:
        return read_latest(path)
    newest = next((step_dir for step_dir in list_checkpoints(path) if find_wrong_size(step_dir) is None), None)
    if newest is None:
        raise UserError(f"{fault}; copy the checkpoint again")
    raise UserError(f"{fault}; give a checkpoint by its own path, such as {newest}")


def _find_fault_of_latest(path: Path) -> str | None:
    if not has_latest(path):
        return f"{path} holds checkpoints and no file {LATEST_NAME}"
    if damage := find_damaged_latest(path):
        return damage
    if not (path / read_latest(path)).is_dir():
        return f"{path / LATEST_NAME} names '{read_latest(path)}', but there is no such folder"
    return None


def _open_checkpoint(path: Path, tag: str, trust_remote_code: bool, trust_checkpoint: bool) -> WeightSource:
    checkpoint = PipelineCheckpoint(path, tag, trust_checkpoint)
    if not checkpoint.is_adapter:
        return checkpoint
    return _open_adapted(path, checkpoint, trust_remote_code, trust_checkpoint)


def _open_adapted(
    path: Path, checkpoint: PipelineCheckpoint | None, trust_remote_code: bool, trust_checkpoint: bool
) -> WeightSource:
    """Return the base model with the adapter merged in. checkpoint: whose layer files hold the adapter; None for a peft
    folder."""
    lora = load_lora_config(path)
    if not lora.base_model_name_or_path:
        raise UserError(
            f"{path / ADAPTER_CONFIG} has no base_model_name_or_path; set it to the model that the adapter belongs to"
        )
    _check_chain(path)
    tensors = {} if checkpoint else load_adapter_tensors(path)
    files = checkpoint.files() if checkpoint else [path / ADAPTER_WEIGHTS]
    try:
        base = open_weights(_name_base(lora), trust_remote_code, trust_checkpoint)
    except UserError as error:
        raise UserError(
            f"{path} holds an adapter, and its base model (base_model_name_or_path) cannot be opened: {error}"
        ) from None
    expected = read_base_fingerprint(checkpoint.step_dir) if checkpoint else read_fingerprint(path)
    if expected is not None and not trust_checkpoint:
        check_base(base, expected, path)
    if (path / "config.json").is_file():
        base = edit_weights(base, _follow_run(base, load_config(path, trust_remote_code)[0]))
    untied = [UntiedHead()] if has_own_head(tensors, build_layers(base.config, base.wrapper)) else []
    read_adapter = checkpoint.read_adapter if checkpoint else read_tensors(tensors)
    adapter = MergedAdapter(path, lora, read_adapter, [path / ADAPTER_CONFIG, *files], tensors.keys())
    return edit_weights(base, [*untied, adapter])


def _follow_run(base: WeightSource, config: PretrainedConfig) -> list[Edit]:
    """Return the edits that a run has made to its base model before it trained an adapter; what its config alone says,
    positions and the pad token of its head, is copied. config: that of the trained model."""
    copy_positions(config, base.config)
    edits: list[Edit] = []
    if (head := find_head(config)) is not None and find_head(base.config) is None:
        base.config.pad_token_id = config.pad_token_id
        labels = Labels(list_labels(config), config.num_labels, config.problem_type)
        edits.append(NewHead(head, labels, seed=0))  # the adapter brings the trained one
    if config.vocab_size > base.config.vocab_size:
        edits.append(ResizedVocabulary(with_rows(base.config, config.vocab_size)))
    if count_trained(config):  # the adapter is on further layers too
        edits.append(FurtherLayers())
    return edits


def _check_chain(path: Path) -> None:
    """Raise UserError where the base of the adapter in `path`, or the base of that, is an adapter that was there
    before."""
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
    name = str(lora.base_model_name_or_path)
    return name if lora.revision is None or Path(name).expanduser().exists() else f"{name}@{lora.revision}"


def _download(hub_id: str) -> Path:
    """Return the hub's snapshot of `hub_id` (ID or ID@REVISION) in the local cache: weights and tokenizer, without
    subfolders, where gpt-oss, for example, has its weights again in other formats."""
    name, revision = split_revision(hub_id)
    if name.startswith(("/", "./", "../", "~")) or name.count("/") > 1:
        raise UserError(f"model_name_or_path '{hub_id}' is not a folder here, nor could it be a hub id; check the path")
    try:
        return _download_weights(name, revision)
    except Exception as error:  # offline, unknown, gated, not an id at all: each has its own type
        raise UserError(
            f"model_name_or_path '{hub_id}' is not a folder here, and could not be downloaded from the hub "
            f"({type(error).__name__}); check the path or hub id"
        ) from None


def _download_weights(name: str, revision: str | None) -> Path:
    """Return the snapshot with the first of `HUB_FORMATS` that it has, or that the cache holds where the hub does not
    answer. Raises the exceptions of `huggingface_hub`."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    incomplete: LocalEntryNotFoundError | None = None
    for read, files, others in HUB_FORMATS:
        try:
            folder = Path(
                snapshot_download(
                    name,
                    revision=revision,
                    allow_patterns=[*HUB_FILES, *files],
                    ignore_patterns=[*HUB_SUBFOLDERS, *others],
                )
            )
        except LocalEntryNotFoundError as error:
            if getattr(error, "snapshot_path", None) is None:
                raise
            incomplete = incomplete or error  # the cache may hold another format
            continue
        if any((folder / name).is_file() for name in read):
            return folder
    if incomplete is not None:
        raise incomplete
    return folder  # with weights under other names, or without any, which its reader reports
