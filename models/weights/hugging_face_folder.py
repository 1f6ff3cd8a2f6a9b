"""A Hugging Face folder: `config.json` with `*.safetensors` or the older `pytorch_model*.bin`, full names
("model.layers.3.mlp..."), with or without an index."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from pathlib import Path

import torch
from safetensors import SafetensorError

from console import pluralize
from errors import UserError
from models.architecture.lookup import build_layers
from models.architecture.unused import find_unread
from models.heads.table import find_head
from models.layers.layer import Layer, TensorPiece
from models.storage.declared_sizes import check_stored
from models.storage.safetensors_writer import TensorInfo
from models.storage.tensor_files import list_shapes, load_json, open_tensors
from models.weights.config_file import load_config
from models.weights.passthrough import describe_tensor
from models.weights.quantized import Read, parse_quantization
from models.weights.source import check_shape, check_tensors

INDEX_FILES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WEIGHT_FILES = ("model.safetensors", INDEX_FILES[0], "pytorch_model.bin", INDEX_FILES[1])  # the first one counts


class HuggingFaceFolder:
    """`model*.safetensors` or `pytorch_model*.bin`, with or without an index."""

    def __init__(self, path: Path, trust_remote_code: bool = False) -> None:
        self.path = self.config_dir = path
        self.config, self.wrapper = load_config(path, trust_remote_code)
        self.quantization = parse_quantization(load_json(path / "config.json"), path / "config.json")
        self._files = _find_tensors(path)
        headers = sorted({file for file in self._files.values() if file.suffix == ".safetensors"})
        check_stored(self.config, path / "config.json", list_shapes(headers))
        self._stored: dict[str, str] = {}  # the names in the files, where they differ
        self._open_file = threading.local()  # the file that a thread has open
        if self.wrapper is not None:  # its folders have had other names over the years
            self._rename({name: self.wrapper.name_in_memory(name) for name in self._files})

    def read_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        return self._read_layer(layer, self._read)

    def describe_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        return self._read_layer(layer, self._describe)

    def count_held(self, index: int, layer: Layer) -> int:
        held = 0
        for name, tensor in self.describe_layer(index, layer).items():
            is_assembled = bool(self._get_pieces(layer, name)[0].index)
            if is_assembled or self.form:
                own = layer.experts.get(name) if is_assembled else None
                held += tensor.nbytes if own is None else tensor[: len(own)].nbytes
        return held

    def read_pieces(self, layer: Layer, name: str) -> list[tuple[tuple[int | slice, ...], torch.Tensor]]:
        """Return the tensors that make up a tensor of the layer's module, as they are in the files (dequantized), each
        with its place."""
        pieces = self._get_pieces(layer, name)
        if not pieces[0].index:
            return [((), self._read_tensor(layer, name, layer.shapes()[name], self._read))]
        return [(piece.index, self._read(piece.hf_name)) for piece in pieces]

    @property
    def form(self) -> str:
        """The form of quantized tensors, a name in `FORMS` (`models/layers/frozen.py`); empty where there are none."""
        return self.quantization.form

    @property
    def unconverted(self) -> tuple[str, ...]:
        """See `DescribedModel`."""
        return self.quantization.unconverted

    def read_kept(self, layer: Layer, name: str) -> tuple[torch.Tensor, ...] | None:
        """See `models/weights/published.py`."""
        pieces, whole = self._get_pieces(layer, name), layer.build_on_meta().get_parameter(name).shape
        if not pieces[0].index:
            return self._read_whole(pieces[0].hf_name, whole, layer.experts.get(name, range(whole[0])))
        return self._read_stack(layer, name, pieces, whole) if len(whole) == 3 else None

    def _read_whole(self, hf_name: str, whole: torch.Size, experts: range) -> tuple[torch.Tensor, ...] | None:
        """Return the parts of a projection, or of a stack that the files hold as one tensor."""
        is_stack = len(whole) == 3
        parts = self.quantization.read_parts(hf_name, self._files, self._read_stored)
        if parts is None and not is_stack:
            return None
        check_shape(self._describe(hf_name), whole, hf_name, str(self.path))
        parts = self._require(parts, hf_name)
        # Copied, so that the files are not read in every pass
        return tuple((part[experts.start : experts.stop] if is_stack else part.unsqueeze(0)).clone() for part in parts)

    def _read_stack(
        self, layer: Layer, name: str, pieces: Sequence[TensorPiece], whole: torch.Size
    ) -> tuple[torch.Tensor, ...]:
        """Return the parts of a stack that the files hold expert by expert."""
        own, matrices = layer.experts.get(name, range(whole[0])), torch.empty(whole, device="meta")
        stacks: list[torch.Tensor] = []
        for piece in pieces:
            if not layer.reads(name, piece):
                continue
            expert, *rest = piece.index
            assert isinstance(expert, int), piece
            place = matrices[piece.index]
            check_shape(self._describe(piece.hf_name), place.shape, piece.hf_name, str(self.path))
            found = self.quantization.read_parts(piece.hf_name, self._files, self._read_stored)
            for number, part in enumerate(self._require(found, piece.hf_name)):
                if any(size % length for size, length in zip(place.shape, part.shape, strict=True)):
                    raise UserError(
                        f"{self.path}: '{piece.hf_name}' {list(place.shape)} is not a whole number of blocks, and "
                        f"experts are kept in {self.form} only where they are; give adapter.keep_quantized=false"
                    )
                # Rows and columns of the matrix for each number of the part
                by = [size // length for size, length in zip(place.shape, part.shape, strict=True)]
                if len(stacks) == number:
                    sizes = (size // length for size, length in zip(whole[1:], by, strict=True))
                    stacks.append(torch.empty(len(own), *sizes, dtype=part.dtype))
                stacks[number][expert - own.start][tuple(map(_divide, rest, by))] = part
        return tuple(stacks)

    def _require(self, parts: tuple[torch.Tensor, ...] | None, name: str) -> tuple[torch.Tensor, ...]:
        if parts is None:
            raise UserError(
                f"{self.path}: '{name}' is not in {self.form}, so that adapter.keep_quantized=true cannot keep it; "
                "give adapter.keep_quantized=false"
            )
        return parts

    def files(self) -> list[Path]:
        indexes = [self.path / name for name in INDEX_FILES if (self.path / name).is_file()]
        return [self.path / "config.json", *indexes, *sorted(set(self._files.values()))]

    def list_passthrough(self) -> list[TensorInfo]:
        unused = self._unread[0]
        whole = self.quantization.list_tensors(self._files)
        parts = self._files.keys() - whole
        parts_of_unused, _ = find_unread(self.config, self.wrapper, parts, ())
        names = [*unused, *(self._list_outside() - unused - parts_of_unused)]
        names.sort(
            key=lambda name: (str(self._files.get(name, "")), self._stored.get(name, name))
        )  # open each file once
        infos = []
        for name in names:
            tensor = self._describe(name) if name in unused else self._read_stored(name).to("meta")
            on_disk = self._stored.get(name, name) if self.wrapper is not None else name
            if name not in unused and (name in parts or (tensor.is_floating_point() and tensor.itemsize == 1)):
                raise UserError(
                    f"{self.path}: '{on_disk}' belongs to a quantized tensor outside the text model; those are "
                    "passed through unchanged, and must be unquantized; give a folder of unquantized weights"
                )
            infos.append(describe_tensor(on_disk, tensor))
        return infos

    def read_passthrough(self, name: str) -> torch.Tensor:
        return self.read(name)

    def check_complete(self, layers: list[Layer]) -> None:
        self._add_prefix(layers)
        expected, outside = self._list_read(layers), self._list_outside()
        present = self.quantization.list_tensors(self._files)
        if self.wrapper is not None:
            self.list_passthrough()  # those outside the text model are not quantized
            expected |= set(self.wrapper.list_missing(outside & present))
        if missing := sorted(expected - present):
            raise UserError(
                f"{self.path}: missing tensors: {len(missing)}, first '{missing[0]}'; is the download complete?"
            )
        extra = present.difference(expected, outside, *self._unread)
        head = f"{self.wrapper.head if self.wrapper is not None else 'lm_head.'}weight"
        if self.config.tie_word_embeddings and head in extra:
            self._check_tied(layers[0], head)
            extra.discard(head)
        if extra:
            raise UserError(
                f"{self.path}: {pluralize(len(extra), 'tensor')} of no layer of a '{self.config.model_type}', "
                f"first '{min(extra)}'; the weights are of another architecture than config.json says"
            )

    @cached_property
    def _unread(self) -> tuple[set[str], set[str]]:
        """The tensors that belong to no part of the model: see `find_unread`."""
        layers = build_layers(self.config, self.wrapper)
        self._add_prefix(layers)
        present = self.quantization.list_tensors(self._files)
        return find_unread(self.config, self.wrapper, present, self._list_read(layers))

    def _list_outside(self) -> set[str]:
        """Return the stored tensors outside the text model."""
        return {name for name in self._files if self.wrapper is not None and not self.wrapper.is_text(name)}

    def _list_read(self, layers: list[Layer]) -> set[str]:
        """Return the names of the tensors that the layers read."""
        return {
            piece.hf_name
            for layer in layers
            if layer.owns_weights
            for name in layer.shapes()
            for piece in self._get_pieces(layer, name)
        }

    def _add_prefix(self, layers: list[Layer]) -> None:
        """Add the prefix that all names of the model begin with, where it is missing: files saved from a model without
        its head (gpt2's on the hub) lack it. Of a model without a head drop that of a model with one."""
        first = layers[0].get_pieces("weight")[0].hf_name
        prefix = first.split(".")[0] + "."
        if self.wrapper is not None or any(name.startswith(prefix) for name in self._files):
            return
        head = find_head(self.config)
        if head is None or head.has_weights:
            self._rename({name: prefix + name for name in self._files})
        elif (longer := next((name for name in self._files if name.endswith(f".{first}")), None)) is not None:
            self._rename({name: name.removeprefix(longer.removesuffix(first)) for name in self._files})

    def _rename(self, names: Mapping[str, str]) -> None:
        """Rename the tensors. names: in the files -> as the layers' tensors are named."""
        self._stored = {name: stored for stored, name in names.items()}
        self._files = {name: self._files[stored] for stored, name in names.items()}

    def _check_tied(self, embedding: Layer, head: str) -> None:
        """Check that the head equals the embedding: a tied model may hold its embedding under the head's name too (.bin
        files do), and `transformers` unties them where they differ."""
        name = embedding.hf_prefix + "weight"
        if not torch.equal(self._read(name), self._read(head)):
            raise UserError(
                f"{self.path}: config.json ties the head to the embedding, but '{head}' differs from '{name}'; "
                'set "tie_word_embeddings" to false in config.json, or remove the tensor'
            )

    def _get_pieces(self, layer: Layer, name: str) -> list[TensorPiece]:
        """Return the pieces of a tensor as most checkpoints have them; or the whole, as `transformers` saves with
        `save_original_format=False`."""
        pieces, whole = layer.get_pieces(name), TensorPiece(layer.hf_prefix + name)
        if self.wrapper is not None:
            pieces = [replace(piece, hf_name=self.wrapper.name_in_memory(piece.hf_name)) for piece in pieces]
        return [whole] if whole.hf_name in self._files and pieces[0].hf_name not in self._files else pieces

    def _read_layer(self, layer: Layer, read: Read) -> dict[str, torch.Tensor]:
        if not layer.owns_weights:
            return {}
        tensors = {name: self._read_tensor(layer, name, shape, read) for name, shape in layer.shapes().items()}
        check_tensors(tensors, layer, str(self.path))
        return tensors

    def _read_tensor(self, layer: Layer, name: str, shape: torch.Size, read: Read) -> torch.Tensor:
        """Return a tensor of the layer's module, mapped from its file, or assembled from several. The memory of experts
        that the layer does not read is never written, and so is not taken."""
        pieces = self._get_pieces(layer, name)
        if not pieces[0].index:
            tensor = read(pieces[0].hf_name)
            if self.wrapper is None or tensor.shape == shape or tensor.dim() != 3:
                return tensor
            return tensor.mT.contiguous() if self.wrapper.may_be_transposed(pieces[0].hf_name) else tensor
        dtype = reduce(torch.promote_types, (self._describe(piece.hf_name).dtype for piece in pieces))
        tensor = torch.empty(0)
        pieces = [piece for piece in pieces if layer.reads(name, piece)]
        for piece in pieces:
            part = read(piece.hf_name)
            if piece is pieces[0]:
                tensor = torch.empty(shape, dtype=dtype, device=part.device)
            place = tensor[piece.index]
            check_shape(part, place.shape, piece.hf_name, str(self.path))
            place.copy_(part)
        return tensor

    def has(self, name: str) -> bool:
        """Return whether the folder has a tensor, quantized or not. name: as the files have it."""
        return self.name_in_memory(name) in self.quantization.list_tensors(self._files)

    def list_quantized(self) -> set[str]:
        """Return the names of the quantized tensors, in memory."""
        ends = self.quantization.PARTS[-1:]
        return {name.removesuffix(ends[0]) for name in self._files if ends and name.endswith(ends[0])}

    def read_published(self, name: str) -> dict[str, torch.Tensor]:
        """Return the parts of a quantized tensor by the ends of their names; none of one that is not quantized. name:
        as the files have it."""
        name, ends = self.name_in_memory(name), self.quantization.PARTS
        if not ends or name + ends[-1] not in self._files:
            return {}
        return {end: self._read_stored(name + end) for end in ends}

    def describe_published(self, name: str) -> dict[str, torch.Tensor]:
        """Return what `read_published` does, on the meta device."""
        return {end: part.to("meta") for end, part in self.read_published(name).items()}

    def dequantize(self, name: str, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the tensor of parts, by the ends of their names."""
        stored = {name + end: part for end, part in parts.items()}
        return self.quantization.read(name, stored, stored.__getitem__)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor, dequantized. name: as the files have it."""
        return self._read(self.name_in_memory(name))

    def describe(self, name: str) -> torch.Tensor:
        """Return what `read` does, on the meta device."""
        return self._describe(self.name_in_memory(name))

    def name_in_memory(self, name: str) -> str:
        """Return the name of a tensor in memory. name: as the files have it."""
        return name if self.wrapper is None else self.wrapper.name_in_memory(name)

    def _read(self, name: str) -> torch.Tensor:
        return self.quantization.read(name, self._files, self._read_stored)

    def _describe(self, name: str) -> torch.Tensor:
        """Return the tensor on the meta device: a mapped tensor is not read."""
        return self.quantization.read(name, self._files, lambda stored: self._read_stored(stored).to("meta"))

    def _read_stored(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise UserError(
                f"{self.path}: tensor '{name}' is missing; is the download complete, and config.json the right one?"
            )
        file = self._files[name]
        current, key = self._open_file.__dict__, str(file)
        if key not in current:
            current.clear()  # one shard mapped at a time
            current[key] = open_tensors(file)
        opened, name = current[key], self._stored.get(name, name)
        try:
            return opened[name] if isinstance(opened, dict) else opened.get_tensor(name)
        except (KeyError, SafetensorError):
            raise UserError(
                f"{file} holds no tensor '{name}', though the index says so; is the download complete?"
            ) from None


def _divide(index: int | slice, by: int) -> slice:
    """Return the blocks, of `by` rows or columns, that a run of these is."""
    assert isinstance(index, slice) and index.step is None, index
    return slice(index.start and index.start // by, index.stop and index.stop // by)


def _find_tensors(path: Path) -> dict[str, Path]:
    """Return tensor name -> file. Which files are the model's is decided as `from_pretrained` of transformers decides
    it: one file comes before an index, safetensors before .bin, and what has another name is not read."""
    named = load_json(path / "config.json").get("transformers_weights")
    chosen = next((name for name in ([named] if named else WEIGHT_FILES) if (path / name).exists()), None)
    if chosen is None:
        raise UserError(
            f"{path} holds no weights ({named or ', '.join(WEIGHT_FILES)}), nor a file 'latest'; transformers reads no "
            "files of other names"
        )
    if not chosen.endswith(".index.json"):
        return dict.fromkeys(open_tensors(path / chosen).keys(), path / chosen)
    weight_map = load_json(path / chosen).get("weight_map")
    if not isinstance(weight_map, dict):
        raise UserError(f"{path / chosen} holds no 'weight_map'; it is not an index of weights")
    if wrong := [name for name, file in weight_map.items() if not isinstance(file, str)]:
        raise UserError(f"{path / chosen}: weight_map gives '{wrong[0]}' no file; fetch the index again")
    shards = sorted(set(weight_map.values()))
    if missing := [file for file in shards if not (path / file).is_file()]:
        raise UserError(
            f"{path}/{chosen} names {missing[0]}, which is not there ({pluralize(len(missing), 'shard')} missing)"
        )
    indexed = {name: path / file for name, file in weight_map.items()}
    if chosen in INDEX_FILES[1:]:
        return indexed
    # transformers reads whatever the shards hold; a tensor in two of them is that of the last
    return indexed | {name: path / file for file in shards for name in open_tensors(path / file).keys()}
