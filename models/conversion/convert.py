"""Hugging Face folder <-> pipeline checkpoint, streaming.

    convert_to_pipeline     any source -> layer files that DeepSpeed loads at any number of stages
    export_hugging_face     any source -> sharded safetensors that `AutoModelForCausalLM.from_pretrained` loads

Passthrough tensors (`models/weights/passthrough.py`) are copied unchanged, dtype included.

Both first plan from names, shapes and dtypes alone, so that bad inputs are refused before a byte is written. Then one
tensor after the other is copied from the mapped source to the new file: at most one layer per worker is allocated, and
nothing at all where neither dtype nor rows change. The values are the source's bits, and `verify` reads them back from
the disk to check. The new folder appears at once, when it is complete. Workers are threads: their work runs outside of
the interpreter.
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

DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DEFAULT_MAX_SHARD_SIZE = 5 * 10**9  # bytes, as in transformers 4
FLUSHED_BYTES = 128 * 2**20
SPARE_BYTES = 16 * 2**20  # headers, config, tokenizer
# DeepSpeed 0.19's `load_checkpoint(load_module_only=True)` reads this in addition to the layer files: no module of its
# own, one file whatever the number of stages.
ENGINE_STATE_NAME = "mp_rank_00_model_states.pt"
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
    """How a new folder is written.

    dtype: of the floating parameters; None keeps each tensor's own. config.json follows what was written. overwrite:
    a folder that is there is replaced. workers: files that are written at once. verify: read every tensor back and
    compare its bits, before the folder appears. export_unused: whether tensors that no layer reads are copied too.
    progress: gets the number of bytes written, and of all.
    """

    dtype: torch.dtype | None = None
    overwrite: bool = False
    workers: int = 1
    verify: bool = False
    export_unused: bool = True
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
    """Write a pipeline checkpoint of `source`: `latest`, config, tokenizer, and `global_step0/` with a file per layer.

    special_tokens: see `SpecialTokens`; embedding and head grow unless they have spare rows.
    pad_vocab_to_multiple_of: adds rows until their number is a multiple; `unpadded_vocab_size` in config.json is the
    number of rows in use.
    Raises UserError for any fault of the source, the output folder or the disk.
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
) -> None:
    """Write a Hugging Face folder of `source`: safetensors of at most `max_shard_size` bytes each, config, tokenizer.

    unpad_vocab: omit the rows that `pad_vocab_to_multiple_of` has added. Raises UserError as `convert_to_pipeline`
    does.
    """
    check_output_dir(output_dir, options.overwrite, source.path, source.files())
    config = trim_vocabulary(source) if unpad_vocab else source.config
    weights = _open_converted(source, config, options)
    check_disk_space(output_dir, weights.nbytes + SPARE_BYTES)
    places = dict(weights.plan_pieces())
    # Wider elements first, so that each tensor is aligned in its file. Stable: with one dtype the order is that of the
    # layers.
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


def _open_converted(source: WeightSource, config: PretrainedConfig, options: WriteOptions) -> ConvertedWeights:
    return ConvertedWeights(
        source,
        config,
        dtype=options.dtype,
        progress=options.progress,
        verify=options.verify,
        export_unused=options.export_unused,
    )


def _for_each(work: Callable[[Item], None], items: Iterable[Item], workers: int) -> None:
    """Call `work` on each item, `workers` of them at once. The first error ends it."""
    with ThreadPoolExecutor(workers) as pool:
        futures = [pool.submit(work, item) for item in items]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _verify(file: Path, places: Mapping[str, tuple[Any, ...]], weights: ConvertedWeights) -> None:
    """Compare the tensors of a file on disk with those in the files of the source, bit by bit; `places` has the
    arguments of `read` by name.

    Raises UserError for a tensor that differs.
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
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
