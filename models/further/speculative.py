"""Greedy decoding with drafts of the layers that predict further tokens (speculative decoding, 2211.17192).

A round is one pass of the model over all tokens so far, the last of which are drafts. A draft is accepted where it is
the token that the model itself would have written; so the text is that of greedy decoding, and a round writes one token
more than it accepts. There is no cache: this measures how often drafts are right, and a server is what gets faster.

D hidden, K depths.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from transformers import PreTrainedModel

from models.further.layers import FurtherDecoderLayer


class SpeculativeDecoder:
    """A model with its further layers. drafted, accepted: of all texts so far."""

    def __init__(self, model: PreTrainedModel, further: Sequence[FurtherDecoderLayer]) -> None:
        """further: the layer of each depth, with the weights, dtype and device of the model."""
        self._model, self._further = model, further
        self.drafted = self.accepted = 0

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], max_new_tokens: int, ends: Collection[int]) -> list[int]:
        """Return the tokens after the prompt, with the one of `ends` that ended them."""
        tokens, drafts = list(prompt), list[int]()
        limit = len(tokens) + max_new_tokens
        while len(tokens) < limit:
            hidden_states = self._run([*tokens, *drafts])  # [1, T, D]
            predicted = self._predict(hidden_states[:, len(tokens) - 1 :])  # after the last token, and each draft
            number = _count_equal(drafts, predicted)
            for count, token in enumerate(predicted[: number + 1]):
                self.drafted += count < len(drafts)
                self.accepted += count < number
                tokens.append(token)
                if token in ends or len(tokens) == limit:
                    return tokens[len(prompt) :]
            drafts = self._draft(hidden_states[:, : len(tokens) - 1], tokens)
        return tokens[len(prompt) :]

    def _run(self, tokens: Sequence[int]) -> torch.Tensor:
        """Return the hidden states after the final norm."""
        input_ids = torch.tensor([tokens], device=self._model.device)
        return self._model.base_model(input_ids=input_ids, use_cache=False).last_hidden_state

    def _predict(self, hidden_states: torch.Tensor) -> list[int]:
        return self._model.get_output_embeddings()(hidden_states)[0].argmax(dim=-1).tolist()

    def _draft(self, hidden_states: torch.Tensor, tokens: Sequence[int]) -> list[int]:
        """Return a draft of each depth after `tokens`. hidden_states: of all of them but the last."""
        length, drafts = hidden_states.shape[1], list[int]()
        integers = (
            torch.arange(length, device=hidden_states.device).unsqueeze(0),
            torch.ones(1, length, dtype=torch.int32, device=hidden_states.device),
        )
        blocks = [hidden_states, *(torch.zeros_like(hidden_states) for _ in self._further)]
        for depth, layer in enumerate(self._further, 1):
            shifted = torch.tensor([[*tokens, *drafts][depth : depth + length]], device=hidden_states.device)
            blocks[depth] = self._model.get_input_embeddings()(shifted)
            blocks = list(layer((torch.cat(blocks), *integers))[0].chunk(len(blocks)))
            drafts += self._predict(blocks[depth][:, -1:])
        return drafts


def _count_equal(drafts: Sequence[int], predicted: Sequence[int]) -> int:
    """Return how many of the first drafts are as predicted."""
    return next((count for count, draft in enumerate(drafts) if draft != predicted[count]), len(drafts))
