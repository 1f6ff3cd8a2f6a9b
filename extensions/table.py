"""The things that each extension of the project offers, so that they are known by their owner where its folder was
removed.

An entry is a key, the prefix of keys (with a dot at its end), a choice of a config group or a value of a key
(KEY=VALUE), a config that `-cn` takes, an option of the training command or of `scripts/supervise.py`, or a module
under its former name.
"""

from __future__ import annotations

_PREFERENCES = ("cpo", "dpo", "kto", "orpo", "reward", "simpo")
_TRACKERS = ("comet", "mlflow", "swanlab", "trackio")
_CLASSES = ("classification", "process_reward", "token_classification")
TABLE: dict[str, tuple[str, ...]] = {
    "classification": (
        *("classification", "classification.", "data.text_pair_field", "data.words_field", "data.label_all_pieces"),
        *("data.steps_field", "data.step_separator"),
        *(f"{group}={name}" for name in _CLASSES for group in ("data", "task")),
        *(f"llama_8b_{name}_pp4" for name in _CLASSES),
        *(f"training.objectives.{name}" for name in _CLASSES),
        *("data.encoders.classification", "data.encoders.token_classification"),
        "models.heads.token_classification",
    ),
    "distillation": (
        *("distill", "distill.", "llama_8b_distill_pp4"),
        *("models.losses.distill_loss", "models.losses.divergence", "models.losses.options"),
        *("training.config.teacher", "training.planner.teacher"),
    ),
    "elastic": ("--elastic", "--hosts_command"),
    "hub": ("hub", "hub.", "training.hub", "training.hub.upload", "training.hub.model_card"),
    "images": (
        *("data.images_field", "data.image_folder", "data.image_backend", "data.image_max_pixels"),
        *("data.image_refuse_pixels", "data=image_chat"),
    ),
    "import_config": (),
    "inspection": ("inspect_data",),
    "preferences": (
        *(each for name in _PREFERENCES for each in (name, f"{name}.", f"task={name}", f"training.objectives.{name}")),
        *("data.chosen_field", "data.rejected_field", "data=preference", "data=unpaired_preference"),
        *("llama_8b_dpo_pp4", "llama_8b_orpo_pp4", "training.objectives.preference"),
        *("data.encoders.preference", "data.storage.mismatched", "models.losses.pairs"),
    ),
    "proof": ("proof",),
    "retrieval": (
        *("embedding", "embedding.", "rerank", "rerank."),
        *("data.query_field", "data.positive_field", "data.negatives_field", "data.num_negatives"),
        *("data.query_prompt", "data.document_prompt"),
        *("data=embedding", "data=rerank", "task=embedding", "task=rerank"),
        *("llama_8b_embedding_pp4", "llama_8b_rerank_pp4"),
        *("data.encoders.retrieval", "models.heads.embedding", "models.heads.sentence_transformers"),
        *("models.losses.embeddings", "training.objectives.embedding", "training.objectives.rerank"),
    ),
    "search": ("plan=search",),
    "sweep": ("--multirun", "training.cli.sweep"),
    "trackers": (*(f"logger={name}" for name in _TRACKERS), *(f"training.trackers.{name}" for name in _TRACKERS)),
}
