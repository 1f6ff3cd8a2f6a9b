"""The features that runs with images do not go together with, and the runs that read their keys."""

from __future__ import annotations

from training.config.incompatible import (
    COLLATOR,
    COMPILED,
    CONTEXT_PARALLEL,
    FROM_SCRATCH,
    FURTHER_TOKENS,
    TENSOR_PARALLEL,
    ZERO_3,
    Row,
    has_value,
)

IMAGES = has_value("data.name", "image_chat")
ROWS: tuple[Row, ...] = (
    (IMAGES, {
        TENSOR_PARALLEL: "its embeddings would be of a part of the vocabulary; give tensor_parallel_size=1",
        CONTEXT_PARALLEL: "an image would be split between ranks; give context_parallel_size=1",
        COMPILED: "it is not tested with compiled layers; give compile=false",
        ZERO_3: "it is not tested with sharded weights; give zero_stage=1 or 2",
        FURTHER_TOKENS: "they would be predicted from tokens of images; give mtp.loss_coef=0",
        COLLATOR: "the places of images are those of rows as they are stored; omit data.collator",
        has_value("proof", "true"): "the small model that it makes has no tower; give data=chat to prove the layout",
        FROM_SCRATCH: "the tower stays as it is, so it needs trained weights; omit init",
    }),
)  # fmt: skip
READERS = dict.fromkeys(
    (
        "data.images_field",
        "data.image_folder",
        "data.image_backend",
        "data.image_max_pixels",
        "data.image_refuse_pixels",
    ),
    IMAGES,
)
