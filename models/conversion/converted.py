"""The output of a conversion: the source's tensors, laid out from their shapes first, then read one by one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import PretrainedConfig

from errors import UserError
from models.architecture.lookup import build_layers
from models.further.table import list_copies
from models.storage.safetensors_writer import TensorInfo
from models.weights.hugging_face_folder import HuggingFaceFolder
from models.weights.passthrough import find_passthrough
from models.weights.resized_vocab import resize_copies, resize_rows
from models.weights.source import WeightSource

PASSTHROUGH = -1  # instead of a layer's index: a tensor that is copied unchanged
Progress = Callable[[int, int], None]  # bytes written (and verified) so far, bytes in all
Place = tuple[Any, ...]  # the arguments of `ConvertedWeights.read`


class ConvertedWeights:
    """The source's tensors as they will be written. Raises UserError for a source that is not complete."""

    quantization: dict[str, Any] | None = None  # of what is written, as config.json has it

    def __init__(
        self,
        source: WeightSource,
        config: PretrainedConfig,
        *,
        dtype: torch.dtype | None,
        progress: Progress | None,
        verify: bool,
        export_unused: bool,
    ) -> None:
        self.source = source
        self.config = config
        self._layers = build_layers(source.config, source.wrapper)
        source.check_complete(self._layers)
        self._dtype = dtype
        self._open_layer = threading.local()  # the layer that each worker thread has open
        self._buffers = [layer.buffer_names() for layer in self._layers]
        self._kept = [names | layer.fp32_in_fp16 for names, layer in zip(self._buffers, self._layers, strict=True)]
        targets = build_layers(config, source.wrapper)
        self.infos = [self._plan_layer(index, targets[index].shapes()) for index in range(len(self._layers))]
        self.passthrough = find_passthrough(source, export_unused)
        resized = resize_copies(self.passthrough.unused, source.config, config)
        self.passthrough_infos = {info.name: resized.get(info.name, info) for info in self.passthrough.kept}
        self.nbytes = sum(info.nbytes for infos in (*self.infos, self.passthrough_infos) for info in infos.values())
        self._progress, self._total = progress, self.nbytes * (2 if verify else 1)
        self._done, self._counting = 0, threading.Lock()
        self.report(0)

    @property
    def dtypes(self) -> set[torch.dtype]:
        """The dtypes of the floating parameters but those that stay in fp32; buffers keep their own."""
        return {
            info.dtype
            for kept, infos in zip(self._kept, self.infos, strict=True)
            for name, info in infos.items()
            if info.dtype.is_floating_point and name not in kept
        }

    def plan_pieces(self) -> Iterator[tuple[TensorInfo, Place]]:
        """Yield each tensor as Hugging Face stores it, with the arguments of `read` for it."""
        for index, infos in enumerate(self.infos):
            for name, info in infos.items():
                whole = torch.empty(info.shape, device="meta")
                for piece in self._layers[index].get_pieces(name):
                    yield (
                        TensorInfo(piece.hf_name, tuple(whole[piece.index].shape), info.dtype),
                        (index, name, piece.index),
                    )
        for name, index in list_copies(self.source.config, self._layers).items():
            info = self.infos[index]["weight"]
            yield TensorInfo(name, info.shape, info.dtype), (index, "weight", ())
        for name, info in self.passthrough_infos.items():
            yield info, (PASSTHROUGH, name, ())

    def read(self, index: int, name: str, place: tuple[int | slice, ...] = ()) -> torch.Tensor:
        """Return a tensor of layer `index`, or its part at `place`: mapped from the source, or new where its dtype or
        its rows change. index: a layer's, or PASSTHROUGH."""
        if index == PASSTHROUGH:
            return resize_rows(self.source.read_passthrough(name), self.passthrough_infos[name].shape)
        info = self.infos[index][name]
        tensor = self._read_layer(index)[name][place]
        if not place:
            tensor = resize_rows(tensor, info.shape)
        converted = tensor.to(info.dtype)
        if info.dtype == torch.float16 and tensor.dtype != torch.float16:
            _check_fp16(converted, tensor, info.name)
        return converted

    def list_stored(
        self, index: int, name: str, place: tuple[int | slice, ...] = ()
    ) -> list[tuple[tuple[int | slice, ...], torch.Tensor]]:
        """Return what the result of `read` has to hold, each tensor with its place in it: those of a Hugging Face
        folder as they are in its files, in the written dtype; else the result itself, which is computed from files.

        Raises UserError for a tensor that the written dtype rounds, unless that dtype was asked for.
        """
        if index == PASSTHROUGH or not isinstance(self.source, HuggingFaceFolder):
            return [((), self.read(index, name, place))]
        layer, info = self._layers[index], self.infos[index][name]
        if tuple(layer.shapes()[name]) != info.shape:  # rows were added
            return [((), self.read(index, name, place))]
        stored = []
        for at, tensor in self.source.read_pieces(layer, name):
            if place in ((), at):
                stored.append((() if place else at, tensor.to(info.dtype)))
            elif at == ():  # the files hold the stack as one tensor
                stored.append(((), tensor[place].to(info.dtype)))
            if self._dtype is None and torch.promote_types(tensor.dtype, info.dtype) != info.dtype:
                raise UserError(
                    f"--verify: '{info.name}' is written in {info.dtype}, and a part of it was {tensor.dtype}"
                )
        assert stored, f"nothing to compare '{info.name}' with"
        return stored

    def report(self, nbytes: int) -> None:
        """Report to the listener that `nbytes` more are written, or verified."""
        with self._counting:
            self._done += nbytes
            if self._progress is not None:
                self._progress(self._done, self._total)

    def _read_layer(self, index: int) -> dict[str, torch.Tensor]:
        current = self._open_layer.__dict__
        if current.get("index") != index:
            current.clear()  # release the old one first: a source that cannot be mapped is in memory
            current.update(index=index, tensors=self.source.read_layer(index, self._layers[index]))
        return current["tensors"]

    def has_file(self, index: int) -> bool:
        """Whether a pipeline checkpoint has a file of the layer; that of a layer without parameters holds none."""
        return self._layers[index].owns_weights

    def _plan_layer(self, index: int, shapes: dict[str, torch.Size]) -> dict[str, TensorInfo]:
        infos, layer = {}, self._layers[index]
        described = self.source.describe_layer(index, layer)
        if layer.owns_weights and (missing := sorted(shapes.keys() - described.keys())):
            raise UserError(
                f"{self.source.path}: there are no weights for '{layer.hf_prefix}{missing[0]}', which the model has; "
                "convert its base model and its adapter one after the other"
            )
        for name, tensor in described.items():
            dtype = tensor.dtype
            if self._dtype is not None and dtype.is_floating_point and name not in self._buffers[index]:
                dtype = torch.promote_types(dtype, self._dtype) if name in layer.list_fp32(self._dtype) else self._dtype
            infos[name] = TensorInfo(layer.hf_prefix + name, tuple(shapes[name]), dtype)
        return infos


def _check_fp16(converted: torch.Tensor, tensor: torch.Tensor, name: str) -> None:
    lowest, highest = converted.aminmax()  # of both: a mask of the whole matrix would cost memory
    if (lowest.isinf() or highest.isinf()) and tensor.isfinite().all():
        raise UserError(f"'{name}' holds values beyond the range of fp16 (65504); pass --dtype bf16 or fp32")
