"""Texts as vectors: queries find their documents among all of a global batch (`contrast.py`).

The loss of a query depends on the vectors of all micro-batches and replicas. So a pass without gradients comes before
each step, and makes all vectors; ranks exchange them, and compute the loss of the whole batch and its gradient with
respect to their own vectors (GradCache, 2101.06983). The step then runs the same texts again: the loss of a micro-batch
is <vectors, gradient>, whose gradient is that of the whole batch. It is exact at any layout as long as both passes give
the same vectors, so nothing may draw random numbers.

An evaluation is one pass: each query is compared with all documents of its file.

A mixture may repeat a record within a batch. A query is not compared with the documents of its copies, which would be
wrong answers although they are its own.

N texts of a micro-batch, D hidden, G texts of a query: itself, its document, its negatives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from batch import Per, Targets
from data.loading.columns import NUMBERS
from data.options import MeanOver, RowTargets
from errors import UserError
from extensions.retrieval.contrast import SHOWN, Contrast, name_sums, pool_texts, summarize_ranks
from extensions.retrieval.head import HEAD
from extensions.retrieval.keys import DataKeys, EmbeddingConfig, Pooling
from extensions.retrieval.sentence_transformers import SentenceModel
from models.heads.head import Labels
from models.layers.random_keys import find_random_key
from models.losses.cross_entropy import Loss
from models.losses.metric_sums import MetricSums
from training.config.schema import DataConfig, RunConfig
from training.objectives.objective import FirstPass, LastStage, Objective, PassOver

_QUERIES_AT_ONCE = 1024  # in an evaluation: their cosines with all documents are in memory


class EmbeddingLoss:
    """The loss of the last stage, with the sums of its metrics over queries. The loss is one of them in evaluations
    alone, which are not made of the losses of micro-batches."""

    def __init__(self, pooling: Pooling, contrast: Contrast, group_size: int, is_packed: bool = False) -> None:
        """group_size: G. is_packed: whether replicas may have different numbers of queries in a step."""
        self._pooling, self._contrast, self._group_size = pooling, contrast, group_size
        self._is_packed = is_packed
        self.sums = (MetricSums(*name_sums(contrast.sizes)),)
        # Of each micro-batch of the coming step: the gradient of its vectors, [N / G, G, D], and its queries' losses
        self._waiting: deque[tuple[torch.Tensor, torch.Tensor]] = deque()
        # Of each micro-batch that `measure` was called with: the numbers of its queries in the data, int64 [N / G]
        self._numbers: list[torch.Tensor] = []

    def measure(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: Targets) -> torch.Tensor:
        """Return `make_vectors` of a micro-batch of the first pass, and keep which queries it has."""
        self._numbers.append(targets.columns["numbers"][:: self._group_size])
        return self.make_vectors(outputs, targets)

    def make_vectors(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: Targets) -> torch.Tensor:
        """Return the vectors of a micro-batch, [N / G, G, D]. outputs, targets: as in `pool_texts`."""
        vectors = pool_texts(outputs, targets, self._pooling)
        return vectors.view(len(vectors) // self._group_size, self._group_size, vectors.shape[1])

    def compare_batch(self, vectors: Sequence[torch.Tensor], num_samples: int, replicas: dist.ProcessGroup) -> None:
        """Compute the loss of the coming step and its gradients. vectors: what `measure` has returned for each of its
        micro-batches on this rank. All ranks of `replicas` call it."""
        own, gathered, numbers = self._gather(vectors, replicas, is_even=not self._is_packed)
        with torch.enable_grad():
            whole = torch.cat(gathered).requires_grad_()
            losses, ranks = self._compare(whole, numbers, range(len(whole)))
            (gradient,) = torch.autograd.grad(losses.sum(), whole)
        first = sum(map(len, gathered[: dist.get_rank(replicas)]))
        mine = slice(first, first + len(own))
        sizes = [len(each) for each in vectors]
        self._waiting = deque(zip(gradient[mine].split(sizes), losses.detach()[mine].split(sizes), strict=True))
        self._add(summarize_ranks(losses[mine], ranks[:, mine]), len(own), with_loss=False)

    def __call__(self, outputs: tuple[torch.Tensor, torch.Tensor], targets: Targets) -> torch.Tensor:
        """outputs, targets: as in `pool_texts`.

        Returns the sum of the losses of the micro-batch's queries over the denominator, fp32 at least, with the
        gradient that the loss of the whole batch has with respect to the vectors of this one.
        """
        assert self._waiting, "the pass over the whole batch comes first, and micro-batches in the same order"
        gradient, losses = self._waiting.popleft()
        vectors, denominator = self.make_vectors(outputs, targets), targets.denominator
        product = (vectors * gradient).sum() / denominator
        return (losses.sum() / denominator + product - product.detach()).to(vectors.dtype)

    def compare_all(self, vectors: Sequence[torch.Tensor], replicas: dist.ProcessGroup) -> None:
        """Add up the metrics of an evaluation. vectors: as in `compare_batch`; replicas may have different numbers."""
        own, gathered, numbers = self._gather(vectors, replicas, is_even=False)
        whole, first = torch.cat(gathered), sum(map(len, gathered[: dist.get_rank(replicas)]))
        self.sums[0].take()  # what an interrupted evaluation has left
        for start in range(first, first + len(own), _QUERIES_AT_ONCE):
            chosen = range(start, min(start + _QUERIES_AT_ONCE, first + len(own)))
            self._add(summarize_ranks(*self._compare(whole, numbers, chosen)), len(chosen), with_loss=True)

    def _gather(
        self, vectors: Sequence[torch.Tensor], replicas: dist.ProcessGroup, *, is_even: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
        """Return the vectors of this rank, end to end, those of each replica, and the numbers of the queries of all.
        is_even: whether replicas have as many queries."""
        own = torch.cat(list(vectors))
        numbers = torch.cat(self._numbers[-len(vectors) :])  # an interrupted evaluation has left others before them
        self._numbers = []
        gathered, all_numbers = (gather_even if is_even else gather_ragged)((own, numbers), replicas)
        return own, gathered, torch.cat(all_numbers)

    def _compare(self, whole: torch.Tensor, numbers: torch.Tensor, chosen: range) -> tuple[torch.Tensor, torch.Tensor]:
        """Compare the chosen queries with the documents of all but their copies; see `Contrast.compare`. whole:
        vectors, [Q, G, D]. numbers: of the queries, [Q]."""
        documents, size = whole[:, 1:].flatten(0, 1), self._group_size - 1
        places = torch.arange(chosen.start, chosen.stop, device=whole.device)
        is_copy = numbers[chosen.start : chosen.stop, None] == numbers
        is_copy.scatter_(1, places[:, None], False)  # the query itself
        left_out = is_copy.repeat_interleave(size, dim=1)
        return self._contrast.compare(whole[chosen.start : chosen.stop, 0], documents, places * size, left_out)

    def _add(self, sums: torch.Tensor, num_queries: int, *, with_loss: bool) -> None:
        counts = torch.full_like(sums, num_queries)
        counts[0] *= with_loss
        self.sums[0].add(sums, counts)


def gather_even(own: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[list[torch.Tensor]]:
    """Return each tensor as all ranks of the group have it, of one shape. own: those of this rank."""
    gathered = [[torch.empty_like(each) for _ in range(dist.get_world_size(group))] for each in own]
    for parts, each in zip(gathered, own, strict=True):
        dist.all_gather(parts, each, group=group)
    return gathered


def gather_ragged(own: Sequence[torch.Tensor], group: dist.ProcessGroup) -> list[list[torch.Tensor]]:
    """Return each tensor as all ranks of the group have it. own: those of this rank, of one length, which may differ
    from that of another rank. The host waits for the device."""
    length = len(own[0])
    (sizes,) = gather_even([torch.tensor([length], device=own[0].device)], group)
    lengths = [int(size) for size in sizes]
    padded = [torch.cat([each, each.new_zeros(max(lengths) - length, *each.shape[1:])]) for each in own]
    return [[part[:stop] for part, stop in zip(parts, lengths, strict=True)] for parts in gather_even(padded, group)]


class TextEmbedding(Objective):
    """A sample is a query with its document and negatives, which follow each other in a micro-batch."""

    name = "embedding"
    pipeline_tag, made_for = "sentence-similarity", "sentence-transformers"
    unit = "queries"
    mean_over = MeanOver.samples
    head = HEAD
    row_targets = RowTargets.last_tokens
    columns = (NUMBERS[Per.document],)
    shown = SHOWN

    def group_size(self, data: DataConfig) -> int:
        assert isinstance(data, DataKeys)
        return 2 + data.num_negatives

    def count_batch_bytes(self, config: RunConfig, global_batch_size: int, hidden_size: int) -> int:
        """Vectors of all replicas, end to end, and their gradient; and of all cosines, for each size of the vectors,
        what autograd keeps (cosines, less the margin, divided, and their log-softmax), two gradients, and which are
        those of copies."""
        group_size = self.group_size(config.data)
        vectors = 3 * global_batch_size * group_size * hidden_size
        cosines = global_batch_size**2 * (group_size - 1)
        num_sizes = 1 + len(config.read_group(EmbeddingConfig).matryoshka_dims or ())
        return 4 * (vectors + (4 * num_sizes + 2) * cosines) + cosines

    def name_labels(self, data: DataConfig) -> Labels:
        return Labels()

    def check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        if tokenizer.pad_token_id is None:
            raise UserError(
                f"task={self.name}: the tokenizer has no pad token, without which sentence-transformers cannot batch "
                "texts; convert2ckpt.py --pad_token '<pad>' adds it"
            )

    def exports(self, config: RunConfig, hidden_size: int) -> SentenceModel:
        data, pooling = config.read_group(DataKeys), config.read_group(EmbeddingConfig).pooling
        prompts = {"query": data.query_prompt, "document": data.document_prompt}
        return SentenceModel(hidden_size, pooling, config.max_seq_length, prompts)

    def loss(self, config: RunConfig, stage: LastStage) -> Loss:
        """Raises UserError for sizes that the vectors do not have, and for a model whose passes draw random numbers."""
        keys = config.read_group(EmbeddingConfig)
        check_sizes(keys.matryoshka_dims, stage.architecture.hidden_size)
        check_repeatable(stage.architecture)
        group_size = self.group_size(config.data)
        return EmbeddingLoss(keys.pooling, build_contrast(keys), group_size, config.data.packing)

    def pass_over(self, config: RunConfig) -> PassOver:
        return PassOver.samples

    def before_step(self, config: RunConfig, loss: EmbeddingLoss) -> FirstPass:
        return FirstPass(loss.measure, loss.compare_batch, loss.compare_all)

    def list_metrics(self, config: RunConfig) -> tuple[str, ...]:
        return name_sums(build_contrast(config.read_group(EmbeddingConfig)).sizes)[1:]


def build_contrast(keys: EmbeddingConfig) -> Contrast:
    """Return how the run compares vectors."""
    return Contrast(keys.temperature, keys.margin, tuple(sorted(keys.matryoshka_dims or ())))


def check_sizes(sizes: Sequence[int] | None, hidden_size: int) -> None:
    """Raise UserError for beginnings of the vectors that are none."""
    if sizes is not None and (not sizes or not all(0 < size < hidden_size for size in sizes)):
        raise UserError(
            f"embedding.matryoshka_dims={list(sizes)}: give sizes below {hidden_size}, that of the model's vectors, or "
            "null"
        )


def check_repeatable(config: PretrainedConfig) -> None:
    """Raise UserError for a model with dropout, which would make other vectors in the step than in the pass before."""
    drawn = find_random_key(config)
    if drawn is not None:
        raise UserError(
            f"config.json: {drawn}={getattr(config, drawn)}; task=embedding runs each text twice a step, and both must "
            "give the same vector: set it to 0 there"
        )
