"""What a run leaves in its folder beside metrics and training checkpoints: config, tokenizer, the exported model."""

from __future__ import annotations

import shutil

from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerBase

from models.adapters import Adapter
from models.conversion import export_hugging_face
from models.vocabulary import teach_end
from models.weights import WeightSource, open_weights
from screen import progress
from training.checked_run import CheckedRun
from training.checkpoint import remove_leftovers
from training.config import RunConfig
from training.run_folder import RunFolder
from training.trainable import export_adapter, save_adapter_config


def prepare_folder(config: RunConfig, source: WeightSource, tokenizer: PreTrainedTokenizerBase, folder: RunFolder, adapter: Adapter | None) -> None:
    """What lies beside the checkpoints: the run's config, and the model's config.json and tokenizer. Main rank only."""
    folder.checkpoints.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder.checkpoints)
    tokenizer.save_pretrained(folder.checkpoints)
    OmegaConf.save(OmegaConf.structured(config), folder.path / "config.yaml")
    if adapter is not None:
        save_adapter_config(adapter, folder.checkpoints)
    if source.path.resolve() == folder.checkpoints.resolve():  # resumed: it is all there
        return
    source.config.save_pretrained(folder.checkpoints)
    if (source.path / "generation_config.json").is_file():
        shutil.copyfile(source.path / "generation_config.json", folder.checkpoints / "generation_config.json")
    for name in ("config.json", "generation_config.json"):
        teach_end(folder.checkpoints / name, tokenizer.eos_token_id)


def export(plan: CheckedRun, folder: RunFolder) -> None:
    """What was trained, for others to load: a Hugging Face model, or a peft folder."""
    if plan.adapter is not None:
        export_adapter(folder.checkpoints, plan.layers, folder.export)
    else:
        with progress("exporting", unit="B") as told:
            export_hugging_face(open_weights(str(folder.checkpoints)), folder.export, overwrite=True, progress=told.reach)
