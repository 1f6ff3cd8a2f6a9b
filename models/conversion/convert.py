"""Converts weights from a Hugging Face folder to a pipeline checkpoint and back, without the whole model in memory.

    convert_to_pipeline    any source -> a pipeline checkpoint: layer files that DeepSpeed loads at any number of stages
    export_hugging_face    any source -> a Hugging Face folder: safetensors that transformers' `from_pretrained` loads

Passthrough tensors (`models/weights/passthrough.py`) are copied in their dtype.

Both functions first plan the new files from names, shapes and dtypes alone, so that bad inputs are refused before a
byte is written. Then they copy tensor after tensor from the mapped source to the new files. Each worker has at most one
layer in memory. A tensor takes no memory of its own if the source stores it as one tensor, and its dtype and its number
of rows stay the same. The values are the source's, bit for bit, unless the dtype changes, rows are added, the source is
quantized or an adapter is merged in. `verify` reads the written values back from the disk and compares them.

The new folder gets its name when it is complete. Workers are threads, since reading, converting and writing run outside
of Python's interpreter lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PretrainedConfig

from errors import UserError
from models.conversion.converted import PASSTHROUGH, ConvertedWeights, Progress
from models.conversion.model_files import write_json, write_model_files
from models.conversion.requantized import RequantizedWeights
from models.storage.folders import (
    check_disk_space,
    check_output_dir,
    drop_from_memory,
    find_custom_tokenizer,
    staged_folder,
)
from models.storage.manifest import CONVERTED_NAME, FileRecord, HashedFile, write_manifest
from models.storage.safetensors_writer import (
    INDEX_NAME,
    build_index,
    name_shards,
    plan_shards,
    write_safetensors,
)
from models.storage.steps import LATEST_NAME
from models.storage.tensor_files import open_tensors
from models.storage.torch_writer import own_storage, save_torch, without_crc32
from models.weights.passthrough import write_passthrough
from models.weights.pipeline_checkpoint import layer_file
from models.weights.source import WeightSource
from models.weights.vocabulary import (
    SpecialTokens,
    grow_vocabulary,
    load_extended_tokenizer,
    trim_vocabulary,
)

# The values of --dtype
DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT_MAX_SHARD_SIZE = 5 * 10**9  # bytes of the tensors in one safetensors file, as in transformers 4
FLUSHED_BYTES = 128 * 2**20  # a shard is flushed to the disk each time that so many bytes of it are written
SPARE_BYTES = 16 * 2**20  # free disk that is required in addition to the tensors: for headers, config and tokenizer
# The file that DeepSpeed 0.19's `load_checkpoint(load_module_only=True)` reads in addition to the layer files. It holds
# no weights, and there is one at any number of stages.
ENGINE_STATE_NAME = "mp_rank_00_model_states.pt"
# The content of this file: the fields that DeepSpeed looks up, as before the first step
ENGINE_STATE: dict[str, Any] = {
    "module": None,
    "optimizer": None,
    "lr_scheduler": None,
    "dp_world_size": 1,
    "mp_world_size": 1,
    "global_steps": 0,
    "global_samples": 0,
    "skipped_steps": 0,
}

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """How a new folder is written."""

    # The dtype of floating-point parameters; None keeps the dtype of each tensor. Buffers and passthrough tensors
    # always keep theirs, and what transformers keeps in fp32 (gates of mixtures) is not rounded. config.json names the
    # written dtype if there is only one, apart from these.
    dtype: torch.dtype | None = None
    overwrite: bool = False  # whether an existing folder is replaced, which must be empty or hold config.json
    workers: int = 1  # threads, each of which writes one file at a time
    verify: bool = False  # whether every tensor is read back from the disk and compared before the folder gets its name
    export_unused: bool = True  # whether tensors that no layer reads are copied too
    requantize: bool = False  # whether what an adapter is merged into stays in the form in which it is published
    # Is called with (bytes done so far, bytes in all). With `verify` each byte counts twice, written and read back.
    progress: Progress | None = None


def convert_to_pipeline(
    source: WeightSource,
    output_dir: Path,
    options: WriteOptions = WriteOptions(),
    *,
    special_tokens: SpecialTokens | None = None,
    pad_vocab_to_multiple_of: int = 1,
    trust_remote_code: bool = False,
) -> None:
    """Write a pipeline checkpoint of `source` to `output_dir`: `latest`, config.json, the tokenizer, and
    `global_step0/` with a file for each layer that has weights of its own.

    special_tokens: tokens that are added to the tokenizer unless it has them. Embedding and head get new rows for those
    beyond their spare rows.
    pad_vocab_to_multiple_of: rows are added to embedding and head until their number is a multiple of this. config.json
    then has the number of rows in use as `unpadded_vocab_size`.
    trust_remote_code: accept a tokenizer that points to custom code. That code is never run here.

    Raises UserError if the source is incomplete or damaged, if its tokenizer cannot be read or points to custom code,
    if `output_dir` exists without `overwrite`, is not a folder to replace or overlaps with the source, if the disk has
    no room, or if `verify` finds a difference.
    """
    check_output_dir(output_dir, options.overwrite, source.path, source.files())
    if (custom := find_custom_tokenizer(source.path)) and not trust_remote_code:
        file = source.path / "tokenizer_config.json"
        raise UserError(
            f"{file} points to custom code ({', '.join(custom)}), which is copied and never run; read it, then pass "
            "--trust_remote_code"
        )
    tokens = special_tokens or SpecialTokens()
    tokenizer = load_extended_tokenizer(source.path, tokens) if tokens else None
    config = grow_vocabulary(source, tokenizer, pad_vocab_to_multiple_of)
    weights = _open_converted(source, config, options)
    check_disk_space(output_dir, weights.nbytes + SPARE_BYTES)

    with staged_folder(output_dir, options.overwrite) as folder:
        step_dir = folder.path / CONVERTED_NAME
        step_dir.mkdir()
        places = {
            layer_file(step_dir, i): {name: (i, name) for name in infos}
            for i, infos in enumerate(weights.infos)
            if weights.has_file(i)
        }

        records: dict[str, FileRecord] = {}

        def write(file: Path, content: dict[str, Any]) -> None:
            with HashedFile(file) as stream:
                save_torch(content, stream)
                records[file.name] = stream.record

        def write_layer(file: Path) -> None:
            write(file, {name: own_storage(weights.read(*place)) for name, place in places[file].items()})
            weights.report(sum(weights.infos[index][name].nbytes for index, name in places[file].values()))
            folder.flush(file)

        with without_crc32():
            _for_each(write_layer, places, options.workers)
        write(step_dir / ENGINE_STATE_NAME, ENGINE_STATE)
        write_manifest(step_dir, records)
        passthrough = {}
        if infos := weights.passthrough_infos:
            file = write_passthrough(
                folder.path, infos.values(), lambda name: weights.read(PASSTHROUGH, name), weights.report
            )
            passthrough[file] = {name: (PASSTHROUGH, name) for name in infos}
        write_model_files(folder, weights, tokenizer, tokens, is_pipeline=True)
        (folder.path / LATEST_NAME).write_text(CONVERTED_NAME)
        if options.verify:
            folder.flush_all()
            written = places | passthrough
            _for_each(lambda file: _verify(file, written[file], weights), written, options.workers)


def export_hugging_face(
    source: WeightSource,
    output_dir: Path,
    options: WriteOptions = WriteOptions(),
    *,
    max_shard_size: int = DEFAULT_MAX_SHARD_SIZE,
    unpad_vocab: bool = False,
) -> str:
    """Write a Hugging Face folder of `source` to `output_dir`: weights in safetensors files, config.json, the
    tokenizer.

    max_shard_size: the most bytes of tensors in one file. A tensor is never split, so a larger one has a file to
    itself.
    unpad_vocab: omit the rows that `pad_vocab_to_multiple_of` of `convert_to_pipeline` added to embedding and head.

    Returns how far requantized weights are from the merged ones, in words; empty without `requantize`.
    Raises UserError as `convert_to_pipeline` does, for `unpad_vocab` if the vocabulary was not padded, and for
    `requantize` as `RequantizedWeights` does.
    """
    check_output_dir(output_dir, options.overwrite, source.path, source.files())
    config = trim_vocabulary(source) if unpad_vocab else source.config
    weights = _open_converted(source, config, options)
    check_disk_space(output_dir, weights.nbytes + SPARE_BYTES)
    places = dict(weights.plan_pieces())
    # Wider elements come first, so that each tensor is aligned in its file. The sort is stable: tensors of one dtype
    # stay in the order of the layers.
    shards = plan_shards(sorted(places, key=lambda info: -info.dtype.itemsize), max_shard_size)

    with staged_folder(output_dir, options.overwrite) as folder:
        files = {folder.path / name: shard for name, shard in zip(name_shards(len(shards)), shards, strict=True)}

        def write(file: Path) -> None:
            unflushed = 0

            def written(nbytes: int) -> None:
                nonlocal unflushed
                weights.report(nbytes)
                unflushed += nbytes
                if unflushed >= FLUSHED_BYTES:  # start writing to disk before the shard is complete
                    folder.flush(file)
                    unflushed = 0

            write_safetensors(file, files[file], read=lambda info: weights.read(*places[info]), written=written)
            folder.flush(file)

        _for_each(write, files, options.workers)
        if len(shards) > 1:
            write_json(build_index(shards), folder.path / INDEX_NAME)
        write_model_files(folder, weights)
        if options.verify:
            folder.flush_all()
            named = {file: {info.name: places[info] for info in shard} for file, shard in files.items()}
            _for_each(lambda file: _verify(file, named[file], weights), named, options.workers)
    return weights.describe_rounding() if isinstance(weights, RequantizedWeights) else ""


def _open_converted(source: WeightSource, config: PretrainedConfig, options: WriteOptions) -> ConvertedWeights:
    """Return the tensors of `source` as they will be written. config: of the new folder, whose vocabulary may have
    another number of rows. Raises UserError for a source that is not complete."""
    return (RequantizedWeights if options.requantize else ConvertedWeights)(
        source,
        config,
        dtype=options.dtype,
        progress=options.progress,
        verify=options.verify,
        export_unused=options.export_unused,
    )


def _for_each(work: Callable[[Item], None], items: Iterable[Item], workers: int) -> None:
    """Call `work` on each item, in `workers` threads. The first error that a call raises is raised here, and the items
    that are not begun are skipped."""
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _verify(file: Path, places: Mapping[str, tuple[Any, ...]], weights: ConvertedWeights) -> None:
    """Compare the tensors in a written file with those of the source, converted to the written dtype, bit by bit. The
    file is read from the disk itself where the system can drop its cached pages.

    places: for each tensor of the file, by its name there, the arguments of `ConvertedWeights.read`. Raises UserError
    for a tensor that differs.
    """
    drop_from_memory(file)
    written = open_tensors(file)
    for name, place in places.items():
        found = written[name] if isinstance(written, dict) else written.get_tensor(name)
        for at, expected in weights.list_stored(*place):
            part = found[at]
            if (
                expected.dtype != part.dtype
                or expected.shape != part.shape
                or not torch.equal(_view_bytes(expected), _view_bytes(part))
            ):
                raise UserError(
                    f"--verify: '{name}' in {file.name} is not what the source holds; "
                    "the disk or the memory is at fault. Nothing was kept"
                )
        weights.report(found.nbytes)


def _view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, uint8 [number of bytes], so that NaNs compare by their bits."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
