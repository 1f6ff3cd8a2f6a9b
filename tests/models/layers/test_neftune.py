"""The noise of NEFTune: how large, how even, and which inputs it depends on."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from models.layers.decoder import Embedding
from models.layers.neftune import EmbeddingNoise, compute_uniform, identify_tokens

D = 64


def embed(rows: list[list[list[int]]], *, seed: int = 7, length: int = 12, trains: bool = True) -> torch.Tensor:
    """Return the noise on rows of documents: the embedding's outputs, which are zero without it."""
    embedding = Embedding(LlamaConfig(vocab_size=50, hidden_size=D)).train(trains)
    torch.nn.init.zeros_(embedding.weight)
    noise = EmbeddingNoise(5.0)
    noise.attach(embedding)
    noise.start_step(seed)
    inputs = torch.zeros(3, len(rows), length, dtype=torch.int64)
    for number, documents in enumerate(rows):
        start = 0
        for segment, tokens in enumerate(documents, 1):
            place = (number, slice(start, start + len(tokens)))
            inputs[0][place] = torch.tensor(tokens)
            inputs[1][place], inputs[2][place] = torch.arange(len(tokens)), segment
            start += len(tokens)
    return embedding((inputs[0], inputs[1], inputs[2].int()))[0].detach()


ONE, OTHER = [3, 4, 5, 6, 3], [7, 8, 9]


def test_a_document_has_its_own_noise_wherever_it_is() -> None:
    alone, packed, wide = embed([[ONE]]), embed([[OTHER], [OTHER, ONE]]), embed([[ONE]], length=30)
    assert torch.equal(packed[1, 3:8], alone[0, :5]) and torch.equal(wide[0, :5], alone[0, :5])
    assert not alone[0, 5:].any() and not packed[1, 8:].any()  # padding
    bound = 5 / (5 * D) ** 0.5  # of 5 tokens
    assert 0.98 * bound < alone.abs().max() <= bound
    assert 0.95 * 5 / (3 * D) ** 0.5 < packed[0].abs().max() <= 5 / (3 * D) ** 0.5


def test_steps_documents_places_and_channels_differ() -> None:
    alone = embed([[ONE]])[0]
    for other in (embed([[ONE]], seed=8), embed([[[3, 4, 5, 6, 4]]]), embed([[[4, 3, 5, 6, 3]]])):
        assert (other[0, :5] == alone[:5]).float().mean() < 0.01
    assert len(set(alone[:5].flatten().tolist())) > 0.99 * 5 * D


def test_there_is_none_in_evaluation() -> None:
    assert not embed([[ONE]], trains=False).any()


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_the_numbers_are_uniform(seed: int) -> None:
    ids = torch.arange(500).view(1, -1) % 40
    keys, lengths = identify_tokens(ids, torch.arange(500).view(1, -1), torch.ones(1, 500, dtype=torch.int32), seed)
    assert torch.equal(lengths, torch.full((1, 500), 500.0))
    numbers = compute_uniform(keys[0], 200).double()
    assert -1 <= numbers.min() < -0.999 and 0.999 < numbers.max() < 1
    counts = torch.histc(numbers, bins=20, min=-1, max=1)
    assert (counts - 5000).abs().max() < 5 * 5000**0.5
    for a, b in ((numbers[1:], numbers[:-1]), (numbers[:, 1:], numbers[:, :-1])):  # neighbors are independent
        assert (a * b).mean().abs() < 5 / 3 / a.numel() ** 0.5
