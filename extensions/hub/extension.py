"""Uploads of a run's exports to the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path

from extension import Extension

EXTENSION = Extension(
    folder=Path(__file__).parent,
    keys={"hub": "extensions.hub.keys:HubConfig"},
    readers="extensions.hub.readers:READERS",
    receiver="extensions.hub.upload:Uploader",
    commands={"python -m extensions.hub OUTPUT_DIR --repo_id ME/MINE": "upload a model, with its card"},
    hints={"push_to_hub": "hub.repo_id", "hub_model_id": "hub.repo_id", "hub_private_repo": "hub.private"},
    aliases={
        "training.hub": "extensions.hub",
        "training.hub.upload": "extensions.hub.upload",
        "training.hub.model_card": "extensions.hub.model_card",
    },
)
