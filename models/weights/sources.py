"""Reading weights, one layer at a time, from either form they come in.

*Hugging Face folder*: `config.json` with `*.safetensors` or the older `pytorch_model*.bin`, whole names
("model.layers.3.mlp..."). *Pipeline checkpoint*: a folder with `latest`, `config.json` and
`global_stepN/layer_XX-model_states.pt`, names without the layer's prefix. Converted folders and training checkpoints
have the same shape.

Both are opened memory-mapped: a tensor's bytes are read when they are used, and nothing ever holds the whole model.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from errors import UserError
from models.adapter_folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, load_adapter_tensors, load_lora_config, read_tensors
from models.architecture import is_ignored, is_supported, unsupported
from models.layer import Layer, Piece
from models.rope_scaling import copy_positions
from models.weights.adapted import AdaptedWeights
from models.weights.carried import describe_tensor, list_carried, read_carried
from models.weights.grown import GrownWeights
from models.weights.quantized import QUANTIZATION_CONFIG, Read, parse_quantization
from models.weights.safetensors_writer import TensorInfo
from models.weights.source import StoredWeights
from models.weights.tensor_files import load_json, load_torch_file, open_tensors
from models.wrapped import Wrapper, unwrap


def open_weights(name_or_path: str, trust_remote_code: bool = False) -> StoredWeights:
    """Opens a Hugging Face folder, a hub id, a folder that holds `latest`, or one `global_stepN`. Of an adapter (a peft
    folder, or the checkpoint of a LoRA run) it gives the base model's weights with the adapter merged in.

    Raises UserError for what is none of these.
    """
    path = Path(name_or_path).expanduser()
    if not path.exists():
        path = _download(name_or_path)
    if path.is_file():
        raise UserError(f"{path} is a file; give the folder it is in")
    if re.fullmatch(r"global_step\d+", path.name):
        return _open_checkpoint(path.parent, path.name, trust_remote_code)
    if (path / "latest").is_file():
        return _open_checkpoint(path, (path / "latest").read_text().strip(), trust_remote_code)
    if (path / ADAPTER_CONFIG).is_file():
        return _open_adapted(path, None, trust_remote_code)
    return HuggingFaceFolder(path, trust_remote_code)


def _open_checkpoint(path: Path, tag: str, trust_remote_code: bool) -> StoredWeights:
    checkpoint = PipelineCheckpoint(path, tag)
    return _open_adapted(path, checkpoint, trust_remote_code) if checkpoint.is_adapter else checkpoint


def _open_adapted(path: Path, checkpoint: PipelineCheckpoint | None, trust_remote_code: bool) -> AdaptedWeights:
    """checkpoint: whose layer files hold the adapter; None for a peft folder."""
    lora = load_lora_config(path)
    if not lora.base_model_name_or_path:
        raise UserError(
            f"{path / ADAPTER_CONFIG} names no base_model_name_or_path; write there which model the adapter belongs to"
        )
    tensors = {} if checkpoint else load_adapter_tensors(path)
    files = checkpoint.files() if checkpoint else [path / ADAPTER_WEIGHTS]
    try:
        base: StoredWeights = open_weights(lora.base_model_name_or_path, trust_remote_code)
    except UserError as error:
        raise UserError(
            f"{path} holds an adapter, and its base model (base_model_name_or_path) cannot be opened: {error}"
        ) from None
    if (path / "config.json").is_file():  # of a run that may have added tokens, or stretched positions
        config_beside, _ = load_config(path, trust_remote_code)
        copy_positions(config_beside, base.config)
        if config_beside.vocab_size > base.config.vocab_size:
            base = GrownWeights(base, config_beside)
    read_adapter = checkpoint.read_adapter if checkpoint else read_tensors(tensors)
    files = [path / ADAPTER_CONFIG, *files]
    return AdaptedWeights(base, path, lora, read_adapter=read_adapter, adapter_files=files, names=tensors.keys())


def layer_file(step_dir: Path, index: int) -> Path:
    """DeepSpeed's name for a layer's weights."""
    return step_dir / f"layer_{index:02d}-model_states.pt"


def load_config(path: Path, trust_remote_code: bool = False) -> tuple[PretrainedConfig, Wrapper | None]:
    """The text model's config as `transformers` reads it from config.json, and the model around it, if there is one.
    Custom code is never run: the layers come from `models/`.

    Raises UserError when it is missing, unreadable, or points to custom code without `trust_remote_code`.
    """
    file = path / "config.json"
    if not file.is_file():
        below = " or ".join(sorted(str(found.parent) for found in path.glob("*/config.json")))
        hint = f"; did you mean {below}?" if below else ""
        raise UserError(
            f"{path} holds no config.json; it is neither a Hugging Face folder nor a pipeline checkpoint{hint}"
        )
    fields = load_json(file)
    if "auto_map" in fields and not trust_remote_code:
        raise UserError(
            f"{file} points to custom code ({', '.join(sorted(fields['auto_map']))}); "
            "check that it only repackages a known architecture, then give trust_remote_code=true "
            "(the other commands: --trust_remote_code)"
        )
    return parse_model(fields, file)


def parse_config(fields: dict[str, Any], file: Path) -> PretrainedConfig:
    """The model that `fields`, the content of `file`, describe. Raises UserError as `parse_model` does, and for a model
    around a text model."""
    text, wrapper = parse_model(fields, file)
    if wrapper is not None:
        raise UserError(
            f"{file}: model_type '{fields['model_type']}' wraps a text model, and only that is trained; give "
            f"model_type '{text.model_type}' and its fields, or the wrapped weights in model_name_or_path"
        )
    return text


def parse_model(fields: dict[str, Any], file: Path) -> tuple[PretrainedConfig, Wrapper | None]:
    """The text model that `fields`, the content of `file`, describe, and the model around it, if there is one. Raises
    UserError for an unknown `model_type` or a bad value.
    """
    model_type = fields.get("model_type")
    if model_type not in CONFIG_MAPPING:
        raise UserError(f"{file}: {unsupported(model_type)}")
    parse_quantization(fields, file)  # the layers carry dequantized weights: their config does not name it
    known = {key: value for key, value in fields.items() if key not in ("auto_map", QUANTIZATION_CONFIG)}
    try:
        config = AutoConfig.for_model(**known)
    except Exception as error:  # transformers validates with types of its own
        raise UserError(f"{file} is not a valid config of a '{model_type}': {' '.join(str(error).split())}") from None
    try:
        text, wrapper = unwrap(config)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    if not is_supported(text):
        within = f" in a '{model_type}'" if wrapper is not None else ""
        raise UserError(f"{file}: {unsupported(text.model_type, within)}")
    return text, wrapper


class PipelineCheckpoint:
    """Layer files, from the converter or from training."""

    def __init__(self, path: Path, tag: str) -> None:
        self.path = path
        self.step_dir = path / tag
        if not tag or not self.step_dir.is_dir():
            raise UserError(f"{path}/latest names '{tag}', but there is no such folder; the checkpoint is incomplete")
        self.config, self.wrapper = load_config(path)

    @property
    def is_adapter(self) -> bool:
        """Whether the layer files hold an adapter's parameters only."""
        return (self.path / ADAPTER_CONFIG).is_file()

    def read_parameters(self, index: int) -> dict[str, torch.Tensor]:
        """What the file of layer `index` holds, unchecked."""
        return load_torch_file(layer_file(self.step_dir, index))

    def read_adapter(self, index: int, layer: Layer, names: list[str]) -> dict[str, torch.Tensor]:
        tensors = self.read_parameters(index)
        return {name: tensors[name] for name in names if name in tensors}

    def read_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        if not layer.owns_weights:
            return {}
        file = layer_file(self.step_dir, index)
        tensors = load_torch_file(file)
        _check_tensors(tensors, layer, str(file))
        return tensors

    def describe_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        return {name: tensor.to("meta") for name, tensor in self.read_layer(index, layer).items()}

    def list_carried(self) -> list[TensorInfo]:
        return list_carried(self.path) if self.wrapper is not None else []

    def read_carried(self, name: str) -> torch.Tensor:
        return read_carried(self.path, name)

    def files(self) -> list[Path]:
        return [self.path / "config.json", *sorted(self.step_dir.glob("layer_*-model_states.pt"))]

    def check_complete(self, layers: list[Layer]) -> None:
        expected = {layer_file(self.step_dir, i).name for i, layer in enumerate(layers) if layer.owns_weights}
        present = {file.name for file in self.step_dir.glob("layer_*-model_states.pt")}
        if missing := sorted(expected - present):
            raise UserError(
                f"{self.step_dir} is incomplete: {len(missing)} of {len(expected)} layer files missing, "
                f"first {missing[0]}; convert or save it again"
            )
        if extra := sorted(present - expected):
            raise UserError(
                f"{self.step_dir} holds {len(present)} layer files where config.json describes {len(expected)}; "
                f"first extra one {extra[0]}; is the config.json beside it another model's?"
            )
        if self.wrapper is not None:
            list_carried(self.path)  # they are there


class HuggingFaceFolder:
    """`model*.safetensors` or `pytorch_model*.bin`, with or without an index."""

    def __init__(self, path: Path, trust_remote_code: bool = False) -> None:
        self.path = path
        self.config, self.wrapper = load_config(path, trust_remote_code)
        self._quantization = parse_quantization(load_json(path / "config.json"), path / "config.json")
        self._files = _find_tensors(path)
        self._stored: dict[str, str] = {}  # the names in the files, where they are others
        self._of_thread = threading.local()  # the file that a thread has open
        if self.wrapper is not None:  # its folders have had other names over the years
            self._rename({name: self.wrapper.name_in_memory(name) for name in self._files})

    def read_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        return self._read_layer(layer, self._read)

    def describe_layer(self, index: int, layer: Layer) -> dict[str, torch.Tensor]:
        return self._read_layer(layer, self._describe)

    def files(self) -> list[Path]:
        return [self.path / "config.json", *sorted(set(self._files.values()))]

    def list_carried(self) -> list[TensorInfo]:
        if self.wrapper is None:
            return []
        names = [name for name in self._files if not self.wrapper.is_text(name)]
        names.sort(key=lambda name: (self._files[name], self._stored[name]))  # each file is opened once
        infos = {name: describe_tensor(self._stored[name], self._read_stored(name).to("meta")) for name in names}
        whole = self._quantization.list_tensors(self._files)
        for name, info in infos.items():
            if name not in whole or (info.dtype.is_floating_point and info.dtype.itemsize == 1):
                raise UserError(
                    f"{self.path}: '{info.name}' belongs to a quantized tensor beside the text model; those are "
                    "carried along as they are, and only unquantized; give a folder of unquantized weights"
                )
        return list(infos.values())

    def read_carried(self, name: str) -> torch.Tensor:
        assert self.wrapper is not None
        return self._read_stored(self.wrapper.name_in_memory(name))

    def check_complete(self, layers: list[Layer]) -> None:
        self._add_prefix(layers[0].get_pieces("weight")[0].hf_name)
        expected = {
            piece.hf_name
            for layer in layers
            if layer.owns_weights
            for name in layer.shapes()
            for piece in self._get_pieces(layer, name)
        }
        present = self._quantization.list_tensors(self._files)
        beside: set[str] = set()
        if self.wrapper is not None:
            self.list_carried()  # they are not quantized
            beside = {name for name in present if not self.wrapper.is_text(name)}
            expected |= set(self.wrapper.list_missing(beside))
        if missing := sorted(expected - present):
            raise UserError(
                f"{self.path}: missing tensors: {len(missing)}, first '{missing[0]}'; is the download complete?"
            )
        extra = {name for name in present - expected - beside if not is_ignored(self.config, name)}
        head = f"{self.wrapper.head if self.wrapper is not None else 'lm_head.'}weight"
        if self.config.tie_word_embeddings and head in extra:
            self._check_tied(layers[0], head)
            extra.discard(head)
        if extra:
            raise UserError(
                f"{self.path}: {len(extra)} tensors belong to no layer of a '{self.config.model_type}', "
                f"first '{min(extra)}'; the weights are of another architecture than config.json says"
            )

    def _add_prefix(self, first: str) -> None:
        """Files saved from a model without its head (gpt2's on the hub) lack the prefix that all of its names begin
        with.
        """
        prefix = first.split(".")[0] + "."
        if self.wrapper is None and not any(name.startswith(prefix) for name in self._files):
            self._rename({name: prefix + name for name in self._files})

    def _rename(self, names: Mapping[str, str]) -> None:
        """Names in the files -> those that the layers' tensors have."""
        self._stored = {name: stored for stored, name in names.items()}
        self._files = {name: self._files[stored] for stored, name in names.items()}

    def _check_tied(self, embedding: Layer, head: str) -> None:
        """A tied model may hold its embedding under the head's name too (.bin files do); `transformers` unties what
        differs.
        """
        name = embedding.hf_prefix + "weight"
        if not torch.equal(self._read(name), self._read(head)):
            raise UserError(
                f"{self.path}: config.json ties the head to the embedding, but '{head}' differs from '{name}'; "
                'set "tie_word_embeddings" to false in config.json, or remove the tensor'
            )

    def _get_pieces(self, layer: Layer, name: str) -> list[Piece]:
        """As most checkpoints have them; or whole, as `transformers` saves with `save_original_format=False`."""
        pieces, whole = layer.get_pieces(name), Piece(layer.hf_prefix + name)
        if self.wrapper is not None:
            pieces = [replace(piece, hf_name=self.wrapper.name_in_memory(piece.hf_name)) for piece in pieces]
        return [whole] if whole.hf_name in self._files and pieces[0].hf_name not in self._files else pieces

    def _read_layer(self, layer: Layer, read: Read) -> dict[str, torch.Tensor]:
        if not layer.owns_weights:
            return {}
        tensors = {name: self._read_tensor(layer, name, shape, read) for name, shape in layer.shapes().items()}
        _check_tensors(tensors, layer, str(self.path))
        return tensors

    def _read_tensor(self, layer: Layer, name: str, shape: torch.Size, read: Read) -> torch.Tensor:
        """A tensor of the layer's module, mapped from its file, or put together from several."""
        pieces = self._get_pieces(layer, name)
        if not pieces[0].index:
            tensor = read(pieces[0].hf_name)
            if self.wrapper is None or tensor.shape == shape or tensor.dim() != 3:
                return tensor
            return tensor.mT.contiguous() if self.wrapper.may_be_transposed(pieces[0].hf_name) else tensor
        tensor = torch.empty(0)
        for piece in pieces:
            part = read(piece.hf_name)
            if piece is pieces[0]:
                tensor = torch.empty(shape, dtype=part.dtype, device=part.device)
            place = tensor[piece.index]
            _check_shape(part, place.shape, piece.hf_name, str(self.path))
            place.copy_(part)
        return tensor

    def _read(self, name: str) -> torch.Tensor:
        return self._quantization.read(name, self._files, self._read_stored)

    def _describe(self, name: str) -> torch.Tensor:
        """The tensor on the meta device: what is mapped is not read."""
        return self._quantization.read(name, self._files, lambda stored: self._read_stored(stored).to("meta"))

    def _read_stored(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise UserError(
                f"{self.path}: tensor '{name}' is missing; is the download complete, and config.json the right one?"
            )
        file = self._files[name]
        current, key = self._of_thread.__dict__, str(file)
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


def _check_tensors(tensors: dict[str, torch.Tensor], layer: Layer, where: str) -> None:
    shapes = layer.shapes()
    if tensors.keys() != shapes.keys():
        wrong = sorted(tensors.keys() ^ shapes.keys())[0]
        state = "missing" if wrong in shapes else "unknown"
        raise UserError(
            f"{where}: tensor '{layer.hf_prefix}{wrong}' is {state}; "
            "the weights are of another model than config.json says"
        )
    for name, shape in shapes.items():
        _check_shape(tensors[name], shape, layer.hf_prefix + name, where)


def _check_shape(tensor: torch.Tensor, shape: torch.Size, name: str, where: str) -> None:
    if tensor.shape != shape:
        raise UserError(f"{where}: '{name}' has shape {list(tensor.shape)}, config.json makes it {list(shape)}")


def _find_tensors(path: Path) -> dict[str, Path]:
    """Tensor name -> file, from the index where there is one."""
    for index_name in ("model.safetensors.index.json", "pytorch_model.bin.index.json"):
        if (path / index_name).is_file():
            weight_map = load_json(path / index_name).get("weight_map")
            if not isinstance(weight_map, dict):
                raise UserError(f"{path / index_name} holds no 'weight_map'; it is not an index of weights")
            if missing := sorted({file for file in weight_map.values() if not (path / file).is_file()}):
                raise UserError(
                    f"{path}/{index_name} names {missing[0]}, which is not there ({len(missing)} shards missing)"
                )
            return {name: path / file for name, file in weight_map.items()}
    whole = path / "model.safetensors"  # beside it lie adapters or a second copy in another format
    files = (
        [whole] if whole.is_file() else sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
    )
    if not files:
        raise UserError(f"{path} holds no weights (*.safetensors or pytorch_model*.bin), nor a file 'latest'")
    return {name: file for file in files for name in open_tensors(file).keys()}


def _download(hub_id: str) -> Path:
    """The hub's snapshot of `hub_id` in the local cache: weights and tokenizer, not what lies in folders of it, such
    as gpt-oss once more in other formats.
    """
    from huggingface_hub import snapshot_download

    if hub_id.startswith(("/", "./", "../", "~")) or hub_id.count("/") > 1:
        raise UserError(f"model_name_or_path '{hub_id}' is not a folder here, nor could it be a hub id; check the path")
    try:
        return Path(
            snapshot_download(
                hub_id,
                allow_patterns=["*.json", "*.safetensors", "*.bin", "*.model", "*.txt", "*.jinja"],
                ignore_patterns=["*/*"],
            )
        )
    except Exception as error:  # offline, unknown, gated, not an id at all: each has its own type
        raise UserError(
            f"model_name_or_path '{hub_id}' is not a folder here, and could not be downloaded from the hub "
            f"({type(error).__name__}); check the path or hub id"
        ) from None
