"""A model's own image processor: from pictures to the tensors that its tower takes, and the tokens that stand for
them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import MODEL_MAPPING, AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from errors import UserError
from extensions.images.families import IMAGE, Family, find_family
from extensions.images.options import ImageBackend

if TYPE_CHECKING:
    from PIL.Image import Image

CONFIGS = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True)
class ImageProcessor:
    """The image processor in a model's folder. config: of the whole model."""

    config: PretrainedConfig
    family: Family
    processor: Any

    def process(self, images: Sequence[Image]) -> dict[str, torch.Tensor]:
        """Return what the tower takes of one or several images, by the names of `Family.inputs`, and of those by which
        `list_tokens` counts."""
        processed = self.processor(list(images), return_tensors="pt", **self.family.options(self.config))
        return {name: torch.as_tensor(value) for name, value in processed.items()}

    def list_tokens(self, processed: Mapping[str, torch.Tensor], tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Return the ids of the tokens that stand for an image. processed: of this image alone. Raises UserError for a
        tokenizer that lacks one of them."""
        image, ids = self.image_token_id, []
        for token in self.family.write(processed, self.config):
            found = image if token == IMAGE else tokenizer.get_vocab().get(token)
            if found is None:
                raise UserError(
                    f"the tokenizer has no token '{token}', which a '{self.config.model_type}' reads beside images; "
                    "give the model's own with tokenizer_name_or_path"
                )
            ids.append(found)
        return ids

    @property
    def image_token_id(self) -> int:
        """The token that an image's vectors take the place of."""
        config: Any = self.config
        return config.image_token_id

    def build_positions(self) -> Any:
        """Return the model's class with its config and nothing else, which is all that `get_rope_index` reads."""
        model_class = MODEL_MAPPING[type(self.config)]
        model: Any = object.__new__(model_class)
        torch.nn.Module.__init__(model)
        model.config = self.config
        return model


@lru_cache(maxsize=2)
def open_processor(path: str, backend: ImageBackend) -> ImageProcessor:
    """Open the image processor of a model. path: the folder of its tokenizer. Raises UserError where it is not there,
    where the model is of no family that reads images, or where a package is missing."""
    if not any((Path(path) / name).is_file() for name in CONFIGS):
        raise UserError(
            f"{path} has no {CONFIGS[0]}: data=image_chat reads the model's own image processor next to its tokenizer; "
            "copy the file there, or name the model's folder in tokenizer_name_or_path"
        )
    try:
        from transformers import AutoImageProcessor

        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        family = find_family(config, path)
        processor = AutoImageProcessor.from_pretrained(path, backend=backend.value, trust_remote_code=False)
    except (ImportError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(
            f"{path}: its image processor cannot be opened ({reason}); pip install --group images, with "
            "data.image_backend=pil or torchvision"
        ) from error
    if type(processor).__name__.endswith("Pil") is not (backend is ImageBackend.pil):
        raise UserError(
            f"data.image_backend={backend.value}: {type(processor).__name__} of {path} is not of this library; "
            "pip install --group images, or give the other one"
        )
    logging.getLogger("PIL").setLevel(logging.WARNING)  # which else tells of each chunk of a file
    return ImageProcessor(config, family, processor)
