"""One micro-batch through a layer, forward and backward on the meta device, operator by operator.

The layer's real `forward` runs on tensors without storage, and autograd's backward pass after it. Whatever a plan says
of the bytes and kernels of a layer is computed from this record of one run.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from training.costs.without_data import FusedAttention, WithoutData
from training.pipeline.activation_checkpoint import is_kept

WITHOUT_KERNEL = ("empty", "detach", "alias", "lift_fresh", "_unsafe_view")  # allocate, or name a tensor that exists


@dataclass(frozen=True)
class Operand:
    """A tensor that an operator takes or makes."""

    storage: int  # the number of its storage within the trace
    nbytes: int  # that it takes in memory; elements that are expanded are there once
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Operator:
    """One call of an operator of torch."""

    name: str  # without namespace and overload, such as "addmm"
    taken: tuple[Operand, ...]
    made: tuple[Operand, ...]
    launches: bool  # False for a view or an allocation, which no kernel is launched for
    is_kept: bool  # whether `activation_checkpoint_mode=selective` keeps its results


@dataclass(frozen=True)
class Trace:
    """The operators of both passes, and what autograd keeps between them."""

    forward: tuple[Operator, ...]
    backward: tuple[Operator, ...] | None  # None if the backward pass does not run on the meta device
    sizes: tuple[int, ...]  # bytes of each storage, by its number
    saved: frozenset[int]  # storages that autograd keeps for the backward pass, without the layer's own weights
    num_repeated: int  # operators of `forward` that come before the last one that autograd keeps something for
    repeated_peak: int  # bytes of storages alive at once in those, at most, the layer's inputs included
    # Bytes of storages alive at once in the backward pass, at most, beyond those at its start and the gradients that go
    # in and out
    backward_peak: int
    gradients: Mapping[str, int]  # storage of each parameter's gradient, by the parameter's name
    result_dtype: torch.dtype  # of the result that the backward pass starts from

    def sum_sizes(self, storages: Iterable[int]) -> int:
        """Return the bytes of storages, each counted once."""
        return sum(self.sizes[storage] for storage in set(storages))


def trace_operators(run: Callable[[], Any]) -> tuple[Operator, ...]:
    """Run a function of tensors without storage, and return the operators that it calls."""
    with (recorder := _Recorder()):
        run()
    return recorder.finish_pass()


def trace_passes(run: Callable[[], Any], module: nn.Module) -> Trace:
    """Run a layer forward and backward, and return the record.

    run: returns the layer's results, the first of which the backward pass starts from; it makes its inputs. Raises what
    the forward pass raises on the meta device, such as NotImplementedError for a choice that depends on data.
    """
    recorder = _Recorder()
    own = {recorder.number(tensor) for tensor in (*module.parameters(), *module.buffers())}
    gradients: dict[str, int] = {}

    def take_gradient(name: str, parameter: torch.Tensor) -> None:
        if parameter.grad is not None:  # some layers pass none
            gradients[name] = recorder.number(parameter.grad)
            parameter.grad = None  # as the sums of gradients take it

    hooks = [
        parameter.register_post_accumulate_grad_hook(partial(take_gradient, name))
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
    ]
    backward: tuple[Operator, ...] | None
    try:
        with WithoutData(), recorder:
            with torch.autograd.graph.saved_tensors_hooks(recorder.pack, lambda tensor: tensor):
                result = run()[0]
            forward, alive = recorder.finish_pass(), recorder.alive
            try:
                if result.requires_grad:
                    result.backward(torch.empty_like(result))
                peak, backward = recorder.peak - alive, recorder.finish_pass()
            except Exception:  # the layers of any family of transformers, whose backward pass nobody has tried on meta
                peak, backward = 0, None
    finally:
        for hook in hooks:
            hook.remove()
        module.zero_grad(set_to_none=True)
    return Trace(
        forward=forward,
        backward=backward,
        sizes=tuple(recorder.sizes),
        saved=frozenset(recorder.saved - own),
        num_repeated=recorder.num_repeated,
        repeated_peak=recorder.repeated_peak,
        backward_peak=peak - 2 * result.untyped_storage().nbytes(),
        gradients=gradients,
        result_dtype=result.dtype,
    )


class _Recorder(TorchDispatchMode):
    """Notes the operators that run under it, and counts the bytes that live."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.alive = self.peak = 0  # bytes of storages that operators have made
        self.saved: set[int] = set()  # storages that autograd has kept
        self.num_repeated = 0  # operators before the last one that autograd has kept something for
        self.repeated_peak = 0  # bytes of storages alive at once in those, at most
        self._numbers: dict[int, int] = {}  # address of a storage that lives -> its number
        self._operators: list[Operator] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        taken = tuple(self._describe(tensor) for tensor in _list_tensors((args, kwargs)))
        made = tuple(self._describe(tensor, is_made=True) for tensor in _list_tensors(result))
        self._operators.append(
            Operator(
                name,
                taken,
                made,
                launches=not function.is_view and not any(word in name for word in WITHOUT_KERNEL),
                is_kept=is_kept(function) or FusedAttention.is_running,
            )
        )
        return result

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note what autograd keeps, as a hook of it: before the operator that takes it runs."""
        self.saved.add(self.number(tensor))
        self.num_repeated, self.repeated_peak = len(self._operators), self.peak
        return tensor

    def number(self, tensor: torch.Tensor, is_made: bool = False) -> int:
        """Return the number of a tensor's storage, a new one the first time. is_made: by an operator."""
        storage = tensor.untyped_storage()
        address, nbytes = storage._cdata, storage.nbytes()
        if address not in self._numbers:
            self._numbers[address] = len(self.sizes)
            self.sizes.append(nbytes)
            self.alive += nbytes * is_made
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._free, address, nbytes * is_made)
        return self._numbers[address]

    def finish_pass(self) -> tuple[Operator, ...]:
        """Return the operators since the last call; the peak begins anew."""
        found, self._operators, self.peak = tuple(self._operators), [], self.alive
        return found

    def _describe(self, tensor: torch.Tensor, is_made: bool = False) -> Operand:
        nbytes = min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())
        return Operand(self.number(tensor, is_made), nbytes, tuple(tensor.shape))

    def _free(self, address: int, nbytes: int) -> None:
        del self._numbers[address]
        self.alive -= nbytes


def _list_tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
