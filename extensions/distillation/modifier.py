"""The divergence from a teacher's distributions, in addition to the cross entropy (1503.02531)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from batch import Column
from errors import UserError
from extensions.distillation.divergence import DistillOptions
from extensions.distillation.keys import DistillConfig, Divergence
from extensions.distillation.loss import KeptTeacherTerm, OnlineTeacherTerm, TeacherHead, TeacherTop
from extensions.distillation.scores import build_teacher_scorer, list_teacher_columns
from extensions.distillation.teacher_pass import derive_teacher
from models.losses.cross_entropy import Loss
from models.losses.logit_chunks import count_chunk_logits
from models.losses.token_loss import TokenLoss
from models.storage.folders import has_tokenizer
from models.weights.vocabulary import open_tokenizer
from training.config.incompatible import write_value
from training.config.schema import Precision, RunConfig
from training.objectives.auxiliary import AuxiliaryModel
from training.objectives.objective import FirstPass, LastStage, PassOver, Scorer


def _read(config: RunConfig) -> DistillConfig:
    return config.read_group(DistillConfig)


class Teacher(AuxiliaryModel):
    """A teacher that has left its most probable tokens next to the data, or is in memory next to its student."""

    name, key, off = "teacher", "distill.teacher", "null"
    architecture_key = "distill.model"
    metrics = ("distill_loss",)
    plan = "extensions.distillation.plan:describe_teacher"

    def read(self, config: RunConfig) -> str | None:
        return _read(config).teacher

    def check(self, config: RunConfig) -> None:
        if _read(config).top_k is None and not _read(config).online:
            raise UserError(
                "distill.top_k=null: the whole vocabulary at each target is not kept; give a number, such as 64, or "
                "distill.online=true"
            )

    def identity(self, config: RunConfig) -> dict[str, str]:
        names = ("coef", "temperature", "divergence", "top_k")
        return {f"distill.{name}": write_value(getattr(_read(config), name)) for name in names}

    def change(self, loss: TokenLoss, config: RunConfig, stage: LastStage) -> Loss:
        keys = _read(config)
        options = DistillOptions(keys.coef, keys.temperature, keys.divergence)
        term = OnlineTeacherTerm(options, stage.auxiliary) if keys.online else KeptTeacherTerm(options)
        return replace(loss, terms=(term, *loss.terms))

    def count_loss_bytes(self, config: RunConfig, num_targets: int, vocabulary: int, on_gpu: bool) -> int:
        """Return the bytes of the teacher's distributions, where they are read, and those of a chunk by which it
        exceeds what its log-softmax takes.

        In a chunk, in fp32 next to the log-probabilities: of the teacher's most probable tokens, the student's
        probabilities, at another temperature their sum's terms too; with a teacher in memory before that its own
        log-probabilities and probabilities, and those terms. Over the whole vocabulary both at the temperature, the
        divergence's terms and their gradient, and for jensen_shannon the mean and its terms.
        """
        keys = _read(config)
        in_chunk = (8 if keys.temperature == 1 else 12) + 4 * keys.online
        if keys.top_k is None:
            in_chunk = 28 if keys.divergence is Divergence.jensen_shannon else 20
        chunk_logits = min(num_targets * vocabulary, count_chunk_logits(on_gpu))
        more = max(0, in_chunk - (10 if config.precision is Precision.bf16 else 8)) * chunk_logits
        if keys.online or keys.top_k is None:
            return more
        return more + num_targets * (4 * keys.top_k + 4 * (keys.top_k + 1))

    def derive(self, config: RunConfig, micro_batch_size: int, micro_batches: int) -> RunConfig:
        return derive_teacher(config, micro_batch_size, micro_batches)

    def check_sizes(self, config: RunConfig, own_rows: int, rows: int) -> None:
        """Raise UserError for a `distill.top_k` of more tokens than both have, or of all where they have other
        numbers."""
        top_k, most = _read(config).top_k, min(own_rows, rows)
        if top_k is None and own_rows != rows:
            raise UserError(
                f"distill.top_k=null: the student's embedding has {own_rows} rows, the teacher's {rows}, so "
                "there is no whole vocabulary; give a number, such as 64"
            )
        if top_k is not None and top_k > most:
            raise UserError(f"distill.top_k={top_k}: the vocabulary has {most} tokens; give fewer, such as 64")

    def check_tokenizer(self, folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise UserError where the tokenizer of the teacher's folder has other tokens than the run's, or other ids for
        them: distributions over different tokens cannot be compared. A folder without a tokenizer is trusted to have
        the same."""
        if not has_tokenizer(folder):
            return
        own, others = tokenizer.get_vocab(), open_tokenizer(folder).get_vocab()
        if own == others:
            return
        example = min(own.items() ^ others.items(), key=lambda entry: entry[::-1])[0]
        raise UserError(
            f"distill.teacher={folder}: its vocabulary of {len(others)} tokens is not the run's of {len(own)}; they "
            f"differ at {example!r}. Give a teacher with the same tokenizer"
        )

    def scored(self, config: RunConfig) -> tuple[Column, ...]:
        keys = _read(config)
        return () if keys.teacher is None or keys.online or keys.top_k is None else list_teacher_columns(keys.top_k)

    def settings(self, config: RunConfig) -> dict[str, Any]:
        return {"top_k": _read(config).top_k, "temperature": _read(config).temperature}

    def build_scorer(self, config: RunConfig, stage: LastStage, num_tokens: int) -> Scorer:
        keys = _read(config)
        assert keys.top_k is not None
        measure = TeacherTop(stage.architecture, keys.temperature, keys.top_k, num_tokens, stage.parallel)
        return build_teacher_scorer(measure)

    def pass_over(self, config: RunConfig) -> PassOver | None:
        return PassOver.auxiliary if _read(config).online else None

    def build_head(self, config: RunConfig, stage: LastStage, num_tokens: int) -> TeacherHead:
        keys = _read(config)
        return TeacherHead(stage.architecture, keys.temperature, keys.top_k, num_tokens, stage.parallel)

    def before_step(self, loss: TokenLoss) -> FirstPass:
        (term,) = (each for each in loss.terms if isinstance(each, OnlineTeacherTerm))
        return FirstPass(term.head.take, term.take_states, by_group=True)


MODIFIERS = (Teacher(),)
