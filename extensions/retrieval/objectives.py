"""The objectives of retrieval."""

from __future__ import annotations

from extensions.retrieval.embedding import TextEmbedding
from extensions.retrieval.rerank import Rerank

OBJECTIVES = (TextEmbedding(), Rerank())
