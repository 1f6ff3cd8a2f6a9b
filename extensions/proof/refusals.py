"""The features that `proof=true` does not go together with: those that plain transformers has no counterpart of."""

from __future__ import annotations

from models.adapters.options import AdapterName
from training.config.incompatible import (
    COLLATOR,
    EMBEDDING_NOISE,
    EVALUATE_ONLY,
    FURTHER_TOKENS,
    IN_4BIT,
    KEPT,
    LORA_DROPOUT,
    STARTS_FROM_BASE,
    USER_LOSS,
    Feature,
    Row,
    has_value,
)

EXISTING_ADAPTER = Feature(
    "adapter.name_or_path",
    lambda run: run.config.adapter.name is AdapterName.lora and bool(run.config.adapter.name_or_path),
)
AUXILIARY_LOSS = Feature("moe.aux_loss_coef > 0", lambda run: run.config.moe.aux_loss_coef > 0)
Z_LOSS = Feature("moe.z_loss_coef > 0", lambda run: run.config.moe.z_loss_coef > 0)
ROWS: tuple[Row, ...] = (
    (has_value("proof", "true"), {
        EVALUATE_ONLY: "it compares the gradients of a run that trains; give evaluate_only=false",
        USER_LOSS: "there is no second implementation of it; give loss=null to prove the layout",
        COLLATOR: "it makes its own rows; omit data.collator to prove the layout",
        AUXILIARY_LOSS: "transformers has another formula for it; give moe.aux_loss_coef=0 to prove the rest",
        Z_LOSS: "transformers has no such loss; give moe.z_loss_coef=0 to prove the rest",
        FURTHER_TOKENS: "transformers has no loss of further tokens; give mtp.loss_coef=0 to prove the rest",
        EMBEDDING_NOISE: "the noise is drawn in each pass; give neftune_noise_alpha=0 to prove the rest",
        LORA_DROPOUT: "what is dropped is drawn in each pass; give adapter.lora_dropout=0 to prove the rest",
        IN_4BIT: "the plain model is in fp32; give adapter.load_in_4bit=false to prove the rest",
        KEPT: "the plain model is in fp32; give adapter.keep_quantized=false to prove the rest",
        STARTS_FROM_BASE: "the signs of a decomposition are free; "
            "give adapter.init_lora_weights=true to prove the rest",
        EXISTING_ADAPTER: "its matrices are those of the large model; "
            "give adapter.name_or_path=null with its adapter.r and adapter.target_modules",
    }),
)  # fmt: skip
