"""What crosses a boundary is one tensor."""

from __future__ import annotations

import pytest
import torch

from training.pipeline.transfers import allocate_joined, join, separate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_message_is_what_was_joined(dtype: torch.dtype) -> None:
    """With sizes that end anywhere within eight bytes, and hidden states that are not contiguous."""
    for length in (1, 3, 7):
        hidden_states = torch.randn(2, 5, length).to(dtype).transpose(1, 2)
        positions, segments = torch.arange(length).expand(2, length), torch.tensor([length], dtype=torch.int32)
        flags = torch.tensor([True, False, True])
        message = (hidden_states, segments, positions, flags)
        joined, shapes = join(message), [(tensor.shape, tensor.dtype) for tensor in message]
        received = allocate_joined(shapes, torch.device("cpu"))
        assert (received.shape, received.dtype) == (joined.shape, joined.dtype)
        received.copy_(joined)
        for got, sent in zip(separate(received, shapes), message, strict=True):
            assert got.dtype == sent.dtype and torch.equal(got, sent)


def test_integers_do_not_keep_the_hidden_states_of_their_message() -> None:
    message = (torch.randn(2, 3, 4), torch.arange(6).view(2, 3))
    shapes = [(tensor.shape, tensor.dtype) for tensor in message]
    hidden_states, positions = separate(joined := join(message), shapes)
    assert hidden_states.untyped_storage()._cdata == joined.untyped_storage()._cdata
    assert positions.untyped_storage().nbytes() == 6 * 8
    assert hidden_states.requires_grad_().is_leaf


def test_one_tensor_is_sent_as_it_is() -> None:
    gradient = torch.randn(2, 3)
    assert join((gradient,)) is gradient
    (received,) = separate(gradient, [(gradient.shape, gradient.dtype)])
    assert received is gradient
