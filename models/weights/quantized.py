"""Published quantized weights: dequantized one tensor at a time while they are read, to config.json's dtype.

Three methods, named by `quantization_config` in config.json; the results have the same bits as transformers' with
`dequantize=True` (integrations/finegrained_fp8.py and mxfp4.py of 5.23), and as compressed-tensors' (0.20):

    fp8    (DeepSeek-V3, 2412.19437) `X` in float8_e4m3fn with `X_scale_inv`, one scale per `weight_block_size`. The
           last blocks are cut at the edge, as in DeepSeek's own conversion. Scales are numbers, or powers of two
           (ue8m0): float8_e8m0fnu or bytes.
    mxfp4  (gpt-oss; OCP Microscaling 1.0) `X_blocks` uint8 [E, rows, groups, 16] with `X_scales` uint8
           [E, rows, groups], 32 numbers of 4 bits per group. `X` itself is transposed: [E, 32 x groups, rows].
    int4   (compressed-tensors' pack-quantized, Kimi K2 Thinking) `X_packed` int32 [rows, columns / 8] with `X_scale`
           [rows, columns / 32] and `X_shape`: symmetric, in groups of 32 numbers of a row.

Tensors that a folder holds unquantized are returned unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch.nn.functional import pad

from errors import UserError
from models.layers import int4
from models.layers.mxfp4 import DOUBLED_PAIRS

QUANTIZATION_CONFIG = "quantization_config"  # the key in config.json
SCALE = "_scale_inv"
BLOCKS, SCALES = "_blocks", "_scales"
_UNREAD = {"_zero_point": "asymmetric", "_g_idx": "in the order of activations"}  # further parts, and what has them
_FORMATS = ("e4m3", "float8_e4m3fn")  # DeepSeek's name, MiniMax's
# What config.json may say of int4 weights. The order in which they were calibrated does not change how they are stored
_INT4 = {
    "num_bits": (4,),
    "type": ("int",),
    "symmetric": (True,),
    "strategy": ("group", None),
    "group_size": (int4.GROUP,),
    "actorder": (None, False, "weight", "static"),
}
_STRIP = 2**18  # numbers that are widened at once: they stay in a core's cache

Read = Callable[[str], torch.Tensor]


class Quantization(Protocol):
    """How a folder stores its tensors. form: its name in `FORMS` (`models/layers/frozen.py`); empty for unquantized
    ones. unconverted: names of modules that are not in it, by config.json; the files decide."""

    form: ClassVar[str]
    PARTS: ClassVar[tuple[str, ...]]  # the ends of the names of a quantized tensor's parts

    @property
    def unconverted(self) -> tuple[str, ...]: ...

    def list_tensors(self, stored: Collection[str]) -> set[str]:
        """Return the names of the tensors that the stored ones make up. Raises UserError for scales under unknown
        names."""

    def read(self, name: str, stored: Collection[str], read_stored: Read) -> torch.Tensor:
        """Return the tensor `name`, dequantized; `read_stored` reads a tensor of the files by its name.

        Raises UserError, naming the tensor, for scales that are missing or do not fit.
        """

    def read_parts(self, name: str, stored: Collection[str], read_stored: Read) -> tuple[torch.Tensor, ...] | None:
        """Return the parts of the tensor `name` in this form, in whole blocks; None for one that is not quantized.
        Raises UserError as `read` does."""


class Unquantized:
    """Tensors are stored unquantized."""

    form: ClassVar[str] = ""
    PARTS: ClassVar[tuple[str, ...]] = ()
    unconverted: tuple[str, ...] = ()

    def list_tensors(self, stored: Collection[str]) -> set[str]:
        return set(stored)

    def read(self, name: str, stored: Collection[str], read_stored: Read) -> torch.Tensor:
        return read_stored(name)

    def read_parts(self, name: str, stored: Collection[str], read_stored: Read) -> None:
        return None


@dataclass(frozen=True)
class Fp8:
    """fp8 matrices with scales. block: rows and columns per scale; None: one scale per matrix. path: the folder, for
    messages. unconverted: see `Quantization`."""

    form: ClassVar[str] = "fp8"
    PARTS: ClassVar[tuple[str, ...]] = ("", SCALE)
    path: Path
    dtype: torch.dtype
    block: tuple[int, int] | None
    unconverted: tuple[str, ...] = ()

    def list_tensors(self, stored: Collection[str]) -> set[str]:
        names = set(stored)
        if others := [name for name in names if name.endswith(".weight_scale")]:
            raise UserError(
                f"{self.path}: '{min(others)}' is a scale in the form of AutoFP8; only '{SCALE}' is supported here. "
                "Give a folder of unquantized weights"
            )
        scales = {name for name in names if name.endswith(SCALE) and name.removesuffix(SCALE) in names}
        activations = {name for name in names if name.endswith(".activation_scale")}  # of static quantization
        return names - scales - activations

    def read(self, name: str, stored: Collection[str], read_stored: Read) -> torch.Tensor:
        parts = self._read_quantized(name, stored, read_stored)
        if len(parts) == 1:
            return parts[0]
        weight, scales = parts
        return dequantize_fp8(weight, scales, self.block or (weight.shape[-2], weight.shape[-1]), self.dtype)

    def read_parts(self, name: str, stored: Collection[str], read_stored: Read) -> tuple[torch.Tensor, ...] | None:
        parts = self._read_quantized(name, stored, read_stored)
        if len(parts) == 1:
            return None
        weight, scales = parts
        rows, columns = self.block or (weight.shape[-2], weight.shape[-1])
        beyond = -weight.shape[-1] % columns, -weight.shape[-2] % rows
        if any(beyond):  # blocks that are cut at the edge are filled up
            weight = pad(weight.view(torch.uint8), (0, beyond[0], 0, beyond[1])).view(weight.dtype)
        return weight, _widen_scales(scales)

    def _read_quantized(self, name: str, stored: Collection[str], read_stored: Read) -> tuple[torch.Tensor, ...]:
        """Return a matrix and its scales, or a tensor that is not quantized alone."""
        weight = read_stored(name)
        has_scales = name + SCALE in stored
        if not has_scales and not _is_8_bit(weight):
            return (weight,)
        if weight.dtype != torch.float8_e4m3fn or weight.dim() < 2:
            raise UserError(
                f"{self.path}: '{name}' {_describe(weight)} cannot be dequantized: fp8 means matrices of "
                "float8_e4m3fn here; give a folder of unquantized weights"
            )
        if not has_scales:
            raise UserError(
                f"{self.path}: '{name + SCALE}', the scales of an fp8 tensor, is missing; is the download complete?"
            )
        scales = read_stored(name + SCALE)
        block = self.block or (weight.shape[-2], weight.shape[-1])
        grid = (*weight.shape[:-2], *(-(-size // by) for size, by in zip(weight.shape[-2:], block, strict=True)))
        if self.block is None and scales.numel() == 1:
            scales = scales.reshape(grid)
        if scales.shape != grid:
            raise UserError(
                f"{self.path}: '{name + SCALE}' has shape {list(scales.shape)}, but {list(weight.shape)} in blocks of "
                f"{list(block)} has {list(grid)}; the file, or weight_block_size in config.json, is of another model"
            )
        return weight, scales


@dataclass(frozen=True)
class Mxfp4:
    """mxfp4 blocks with scales. path: the folder, for messages."""

    form: ClassVar[str] = "mxfp4"
    PARTS: ClassVar[tuple[str, ...]] = (BLOCKS, SCALES)
    path: Path
    dtype: torch.dtype
    unconverted: tuple[str, ...] = ()  # which are projections, and those are never in this form

    def list_tensors(self, stored: Collection[str]) -> set[str]:
        parts = {name for name in stored if name.endswith((BLOCKS, SCALES))}
        return {name.removesuffix(BLOCKS).removesuffix(SCALES) if name in parts else name for name in stored}

    def read(self, name: str, stored: Collection[str], read_stored: Read) -> torch.Tensor:
        parts = self.read_parts(name, stored, read_stored)
        if parts is None:
            return read_stored(name)
        blocks, scales = parts
        return dequantize_mxfp4(blocks, scales, self.dtype)

    def read_parts(self, name: str, stored: Collection[str], read_stored: Read) -> tuple[torch.Tensor, ...] | None:
        parts = tuple(name + part for part in self.PARTS)
        missing = [part for part in parts if part not in stored]
        if len(missing) == 2:
            return None
        if missing:
            raise UserError(
                f"{self.path}: '{missing[0]}', a part of an mxfp4 tensor, is missing; is the download complete?"
            )
        blocks, scales = map(read_stored, parts)
        if {blocks.dtype, scales.dtype} != {torch.uint8} or blocks.dim() != 4 or blocks.shape != (*scales.shape, 16):
            raise UserError(
                f"{self.path}: '{parts[0]}' {_describe(blocks)} and '{parts[1]}' {_describe(scales)} do not fit: mxfp4 "
                "has uint8 [experts, rows, groups, 16] and [experts, rows, groups]; the file is of another format"
            )
        return blocks, scales


@dataclass(frozen=True)
class Int4:
    """int4 matrices in groups, packed by compressed-tensors. path: the folder, for messages."""

    form: ClassVar[str] = "int4"
    PARTS: ClassVar[tuple[str, ...]] = ("_packed", "_scale", "_shape")
    path: Path
    dtype: torch.dtype
    unconverted: tuple[str, ...] = ()  # as of mxfp4

    def list_tensors(self, stored: Collection[str]) -> set[str]:
        for end, kind in _UNREAD.items():
            if others := [name for name in stored if name.endswith(".weight" + end)]:
                raise UserError(
                    f"{self.path}: '{min(others)}' is a part of an int4 tensor that is {kind}; only symmetric ones in "
                    "the order of their columns are read here. Give a folder of unquantized weights"
                )
        ends = tuple(".weight" + part for part in self.PARTS)
        return {name.rpartition("_")[0] if name.endswith(ends) else name for name in stored}

    def read(self, name: str, stored: Collection[str], read_stored: Read) -> torch.Tensor:
        parts = self.read_parts(name, stored, read_stored)
        if parts is None:
            return read_stored(name)
        codes, scales = (part.unsqueeze(0) for part in parts)
        return int4.dequantize((codes, scales), (codes.shape[1], 8 * codes.shape[2]), self.dtype)[0]

    def read_parts(self, name: str, stored: Collection[str], read_stored: Read) -> tuple[torch.Tensor, ...] | None:
        parts = [name + part for part in self.PARTS]
        missing = [part for part in parts if part not in stored]
        if len(missing) == len(parts):
            return None
        if missing:
            raise UserError(
                f"{self.path}: '{missing[0]}', a part of an int4 tensor, is missing; is the download complete?"
            )
        codes, scales, shape = map(read_stored, parts)
        is_packed = codes.dtype == torch.int32 and codes.dim() == 2 and scales.is_floating_point()
        whole = [len(codes), 8 * codes.shape[-1]] if is_packed else []
        if not is_packed or list(scales.shape) != [whole[0], whole[1] / int4.GROUP]:
            raise UserError(
                f"{self.path}: '{parts[0]}' {_describe(codes)} and '{parts[1]}' {_describe(scales)} do not fit: int4 "
                f"has int32 [rows, columns / 8] and scales [rows, columns / {int4.GROUP}]; the file is of another "
                "format"
            )
        if not shape.is_meta and shape.tolist() != whole:
            raise UserError(
                f"{self.path}: '{parts[2]}' is {shape.tolist()}, but '{parts[0]}' {_describe(codes)} packs {whole}; "
                "the file is damaged, or its columns do not fill whole groups"
            )
        return codes, scales


def parse_quantization(fields: dict[str, Any], file: Path) -> Quantization:
    """Return how the weights next to `file` (config.json) are stored, from its content `fields`.

    Raises UserError, naming the method, for one that cannot be dequantized here.
    """
    quantization = fields.get(QUANTIZATION_CONFIG)
    if quantization is None:
        return Unquantized()
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method == "fp8":
        _check_known(quantization, file, fmt=_FORMATS, expert_dtype=("fp8",))
        return Fp8(
            file.parent, _get_dtype(fields, file), _get_block(quantization, file), _list_unconverted(quantization)
        )
    if method == "mxfp4":
        return Mxfp4(file.parent, _get_dtype(fields, file))
    if method == "compressed-tensors":
        _check_known(quantization, file, format=("pack-quantized",))
        _check_int4(quantization.get("config_groups"), file)
        return Int4(file.parent, _get_dtype(fields, file))
    raise UserError(
        f"{file}: the weights are quantized ({method or 'no quant_method'}), and only fp8, mxfp4 and int4 of "
        "compressed-tensors are dequantized here; give a folder of unquantized ones"
    )


def _check_known(quantization: dict[str, Any], file: Path, **supported: tuple[str, ...]) -> None:
    for key, values in supported.items():
        if (value := quantization.get(key, values[0])) not in values:
            raise _unknown(file, key, value, values[0])


def _check_int4(groups: Any, file: Path) -> None:
    """Raises UserError for layers that are quantized in another way. groups: `config_groups`, the ways by name."""
    if not isinstance(groups, dict) or not groups:
        raise _unknown(file, "config_groups", groups, "a group of weights in int4")
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise _unknown(file, f"config_groups.{name}.weights", weights, "int4")
        for key, values in _INT4.items():
            if (value := weights.get(key)) not in values:
                raise _unknown(file, f"config_groups.{name}.weights.{key}", value, values[0])


def _unknown(file: Path, key: str, value: object, known: object) -> UserError:
    return UserError(
        f"{file}: {QUANTIZATION_CONFIG}.{key}={value!r}: only {known!r} is dequantized here; give a folder of "
        "unquantized weights"
    )


def _get_block(quantization: dict[str, Any], file: Path) -> tuple[int, int] | None:
    block = quantization.get("weight_block_size", (128, 128))  # transformers' default
    if block is None:
        return None
    if not isinstance(block, list | tuple) or [type(size) for size in block] != [int, int] or min(block) < 1:
        raise UserError(f"{file}: {QUANTIZATION_CONFIG}.weight_block_size={block!r}: two sizes from 1 on, or null")
    return block[0], block[1]


def _list_unconverted(quantization: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of modules that are not in fp8; what is not a list of names is no reason to refuse files that
    say themselves what they hold."""
    names = quantization.get("modules_to_not_convert")
    return tuple(each for each in names if isinstance(each, str)) if isinstance(names, list) else ()


def _get_dtype(fields: dict[str, Any], file: Path) -> torch.dtype:
    """Return the dtype of config.json, as in transformers."""
    name = fields.get("dtype") or fields.get("torch_dtype") or "bfloat16"
    if name not in ("bfloat16", "float16", "float32"):
        raise UserError(f"{file}: quantized weights are dequantized to its dtype, which is {name!r}; write 'bfloat16'")
    return getattr(torch, name)


def dequantize_fp8(
    weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Return weight [..., R, C] float8_e4m3fn times scales [..., ceil(R / rows), ceil(C / columns)]. Computed in fp32,
    rounded once to `dtype`; no more than `_STRIP` numbers, or one row, are in fp32 at once.

    transformers derives the block from the grid of scales, so it refuses DeepSeek-V3's [576, 7168] and takes blocks of
    96 rows for [192, ...]; DeepSeek's blocks are cut at the edge.
    """
    rows, columns = block
    dequantized = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    if weight.is_meta:
        return dequantized
    matrices = zip(*(tensor.reshape(-1, *tensor.shape[-2:]) for tensor in (weight, scales, dequantized)), strict=True)
    strip = max(1, _STRIP // weight.shape[-1])
    for matrix, grid, out in matrices:
        wide = _widen_scales(grid).repeat_interleave(columns, dim=1)[:, : matrix.shape[1]]
        for block_rows, out_rows, row_scales in zip(matrix.split(rows), out.split(rows), wide, strict=True):
            for part, place in zip(block_rows.split(strip), out_rows.split(strip), strict=True):
                place.copy_(_widen_fp8(part).mul_(row_scales))
    return dequantized


def _widen_scales(scales: torch.Tensor) -> torch.Tensor:
    return (scales.float() - 127).exp2() if scales.dtype == torch.uint8 else scales.float()


def _widen_fp8(weight: torch.Tensor) -> torch.Tensor:
    """Convert float8_e4m3fn to fp32, exactly: sign, exponent and mantissa are moved to their places in fp16, whose
    exponents begin 8 lower. Five times as fast as torch's own conversion (2.13, CPU), which handles NaN."""
    bits = weight.view(torch.int8)
    if (bits & 0x7F).max() == 0x7F:
        return weight.float()
    moved = bits.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)  # the sign was extended into bit 14
    return moved.view(torch.float16).float().mul_(2.0**8)


def dequantize_mxfp4(blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Convert blocks [E, rows, groups, 16] and scales [E, rows, groups], both uint8, to [E, 32 x groups, rows]. Each
    number is exact in fp32 and rounded once to `dtype`; no more than `_STRIP` numbers, or one row, are in fp32 at once.
    """
    experts, rows, groups, _ = blocks.shape
    dequantized = torch.empty(experts, 32 * groups, rows, dtype=dtype, device=blocks.device)
    if blocks.is_meta:
        return dequantized
    strip = max(1, _STRIP // (32 * groups))
    for expert, exponents, out in zip(blocks, scales, dequantized, strict=True):
        by_row = zip(expert.split(strip), exponents.split(strip), out.T.split(strip), strict=True)
        for part, exponent, place in by_row:
            halves = (exponent.float() - 128).exp2()[..., None]  # of the scales: 2**128 is beyond fp32
            place.copy_(_widen_fp4(part).mul_(halves).view(place.shape))
    return dequantized


def _widen_fp4(blocks: torch.Tensor) -> torch.Tensor:
    """Convert uint8 [..., 16] to twice its numbers in fp32 [..., 32]. Both numbers of a byte are looked up as one of 8
    bytes, which is three times as fast (torch 2.13, CPU)."""
    pairs = DOUBLED_PAIRS.view(torch.int64).flatten()
    looked_up = pairs.index_select(0, blocks.flatten().int())
    return looked_up.view(torch.float32).view(*blocks.shape[:-1], -1)


def _is_8_bit(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.itemsize == 1


def _describe(tensor: torch.Tensor) -> str:
    return f"({str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)})"
