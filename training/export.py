"""Files of a run in addition to metrics and training checkpoints: config, tokenizer, the exported model."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from console import progress, say
from errors import UserError
from filesystem import publish_changed, write_atomically
from models.adapters.folder import load_adapter_tensors
from models.adapters.peft_export import export_adapter, save_adapter_config
from models.conversion.convert import WriteOptions, export_hugging_face
from models.conversion.model_files import write_json
from models.heads.table import find_head
from models.storage.folders import PROMPT_TEMPLATE, check_disk_space, copy_small_files
from models.storage.steps import TEMPORARY_PREFIX
from models.weights.config_file import describe_config
from models.weights.fingerprint import read_base_fingerprint
from models.weights.passthrough import Passthrough, find_passthrough, write_passthrough
from models.weights.source import get_whole_config
from models.weights.sources import open_weights
from models.weights.trained_adapter import read_trained_adapter
from models.weights.vocabulary import add_eos_token_id, set_pad_token_id
from training.checkpoint.state import remove_leftovers
from training.config.changed_keys import write_config
from training.export_receiver import ExportReceiver
from training.inputs.datasets import build_chat_template
from training.objectives.registry import get_objective
from training.setup import Run, RunSetup

_WITH_TOKEN_IDS = ("config.json", "generation_config.json")


def prepare_folder(
    run: Run,
    tokenizer: PreTrainedTokenizerBase,
    stop_tokens: Collection[str] = (),
    prompt_template: str | None = None,
) -> None:
    """Write the files next to the checkpoints: the run's config, the model's config.json and the tokenizer. With
    `overwrite_output_dir`, delete the files of an earlier run first. Main rank only.

    stop_tokens: at which the trained model stops, in addition to the tokenizer's eos token.
    prompt_template: that all prompts are laid into; None where they are in the chat template, or there are none.
    All checkpoints share these files, so a resumed run leaves those that are the same untouched, and replaces the
    others whole. Raises UserError, before anything is deleted, when the disk has no room.
    """
    config, setup, folder = run.config, run.setup, run.folder
    is_resumed = setup.source.path.resolve() == folder.checkpoints.resolve()
    passthrough = Passthrough()
    if setup.adapter is None and not is_resumed:
        passthrough = find_passthrough(setup.source, config.export_unused)
    if passthrough.kept:
        reclaimed = folder.measure() if config.overwrite_output_dir else 0
        check_disk_space(folder.checkpoints, passthrough.nbytes - reclaimed)
    if config.overwrite_output_dir:
        folder.clear()
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder.checkpoints)
    write_atomically(folder.path / "config.yaml", write_config(config))
    staged = folder.checkpoints / f"{TEMPORARY_PREFIX}shared"
    staged.mkdir()
    tokenizer.save_pretrained(staged)
    if setup.adapter is not None:
        save_adapter_config(setup.adapter, staged, get_whole_config(setup.source))
    if (files := get_objective(config).exports(config, setup.architecture.hidden_size)) is not None:
        files.save(staged)
    if is_resumed:
        for name in _WITH_TOKEN_IDS:
            if (folder.checkpoints / name).is_file():
                shutil.copyfile(folder.checkpoints / name, staged / name)
    else:
        _save_model_files(setup, staged, passthrough)
    _add_token_ids(setup, tokenizer, staged, stop_tokens)
    if prompt_template is not None:
        (staged / PROMPT_TEMPLATE).write_bytes(prompt_template.encode())
    else:  # one may have come with the source, or be an earlier run's
        for path in (staged, folder.checkpoints):
            (path / PROMPT_TEMPLATE).unlink(missing_ok=True)
    publish_changed(staged, folder.checkpoints)
    shutil.rmtree(staged)


def _save_model_files(setup: RunSetup, folder: Path, passthrough: Passthrough) -> None:
    config, source = setup.config, setup.source
    has_own_tokenizer = config.tokenizer_name_or_path is not None or build_chat_template(config.data)
    for source_dir in (source.path, source.config_dir):
        copy_small_files(source_dir, folder, with_tokenizer=source_dir == source.path and not has_own_tokenizer)
    fields = describe_config(source.config_dir, setup.architecture)
    passthrough.update_config(fields, source.config, is_pipeline=True)
    write_json(fields, folder / "config.json")
    if passthrough.kept:
        write_passthrough(folder, passthrough.kept, source.read_passthrough)
    if (source.config_dir / "generation_config.json").is_file():
        shutil.copyfile(source.config_dir / "generation_config.json", folder / "generation_config.json")


def _add_token_ids(
    setup: RunSetup, tokenizer: PreTrainedTokenizerBase, folder: Path, stop_tokens: Collection[str]
) -> None:
    """Add the ids of the tokens at which the model stops, and for a classifier the padding, to the files in `folder`. A
    resumed run may have another tokenizer than the one that these were written with."""
    for name in _WITH_TOKEN_IDS:
        for token_id in (tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(sorted(stop_tokens))):
            add_eos_token_id(folder / name, token_id)
    # `transformers` searches for the last token that is not padding; a token classifier may have none
    if find_head(setup.architecture) is not None and tokenizer.pad_token_id is not None:
        set_pad_token_id(folder / "config.json", tokenizer.pad_token_id)


def export_steps(run: Run, receivers: Sequence[ExportReceiver], step: int) -> None:
    """Export the steps of `export_steps` up to this one, just saved, while the run continues; and this one, if a
    receiver takes it: that one becomes `hf/`. A receiver that is busy goes without it."""
    config, setup, folder = run.config, run.setup, run.folder
    source = folder.find_checkpoint(step)
    for due in list_unexported(run, step):
        export(setup, folder.find_checkpoint(due), folder.find_export(due), shows=False)
    due_at = [receiver for receiver in receivers if receiver.is_due(config, step)]
    if any(receiver.is_busy for receiver in receivers):  # with hf/
        for receiver in due_at:
            say(f"{receiver.name}: step {step} is left out, since the step before is not done; let fewer steps be due")
        return
    if due_at:
        export(setup, source, folder.export, shows=False)
    for receiver in due_at:
        receiver.start(folder.export, f"step {step}")


def export_end(run: Run, step: int, best_step: int | None) -> Path | None:
    """Export the model that a run ends with, after the steps of `export_steps` that still lack their export. Returns
    the folder; None for a run that saved nothing at its end.

    step: the last one. best_step: that of `load_best_model_at_end`, or None. Raises UserError where the checkpoint to
    export is not there.
    """
    setup, folder = run.setup, run.folder
    for due in list_unexported(run, step):
        export(setup, folder.find_checkpoint(due), folder.find_export(due))
    lost = [str(due) for due in setup.config.export_steps if due <= step and not folder.find_export(due).exists()]
    if lost:
        say(f"export_steps: no checkpoint of step {', '.join(lost)} is there, so it is not exported")
    source = folder.find_checkpoint(step if best_step is None else best_step)
    if source.is_dir():
        export(setup, source, folder.export)
        return folder.export
    if best_step is None and not setup.config.save_final:
        return None
    raise UserError(
        f"{source}, which this run ends with, has been removed, so nothing is exported; continue with resume=auto, or "
        "export another checkpoint with convert2ckpt.py --to_hf"
    )


def list_unexported(run: Run, step: int) -> list[int]:
    """Return the steps of `export_steps` up to `step` that are saved and not exported: this one, and earlier ones whose
    export has failed or was interrupted."""
    folder, due = run.folder, [each for each in sorted(set(run.config.export_steps)) if each <= step]
    return [each for each in due if folder.find_checkpoint(each).is_dir() and not folder.find_export(each).exists()]


def export(setup: RunSetup, step_dir: Path, output_dir: Path, shows: bool = True) -> None:
    """Export the trained weights of a checkpoint to a Hugging Face model, or to a peft folder, and read them back.

    shows: whether to show progress. Raises UserError where the folder cannot be written, or holds something else.
    """
    if setup.adapter is not None:
        tensors = read_trained_adapter(step_dir, setup.layers)
        base = read_base_fingerprint(step_dir)
        export_adapter(step_dir.parent, tensors, setup.layers, output_dir, base)
        _check_exported(tensors, output_dir)
        return
    with progress("exporting", unit="B", shown=shows) as bar:
        unused = setup.config.export_unused
        options = WriteOptions(overwrite=True, verify=True, progress=bar.reach, export_unused=unused)
        export_hugging_face(open_weights(str(step_dir)), output_dir, options)


def _check_exported(tensors: Mapping[str, torch.Tensor], output_dir: Path) -> None:
    """Raise UserError unless a peft folder holds these tensors, bit by bit."""
    written = load_adapter_tensors(output_dir)
    for name, tensor in tensors.items():
        if name not in written or not torch.equal(written[name], tensor):
            raise UserError(
                f"{output_dir}: '{name}' is not what the checkpoint holds; the disk or the memory is at fault"
            )
