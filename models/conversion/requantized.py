"""Merged weights back in the form in which their base model is published: fp8, mxfp4 or int4.

A tensor that is quantized in the files of the base model is written under the same names, in the same shapes and
dtypes. One that is still the base model's, number for number, is copied as those files hold it; another one is rounded,
and how far that is from what was merged is reported.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from console import pluralize
from errors import UserError
from models.conversion.converted import PASSTHROUGH, ConvertedWeights, Place
from models.layers import int4
from models.layers.mxfp4 import DOUBLED_PAIRS
from models.storage.safetensors_writer import TensorInfo
from models.storage.tensor_files import load_json
from models.weights.edits import EditedWeights
from models.weights.hugging_face_folder import HuggingFaceFolder
from models.weights.quantized import QUANTIZATION_CONFIG, Fp8, Int4, Quantization
from models.weights.source import WeightSource

_FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
_FP4 = DOUBLED_PAIRS[:8, 0] / 2  # the numbers from 0 to 6 by their code
_INT4_STEPS = 7.5  # from 0 to the largest number of a group, as compressed-tensors takes it for -8 to 7


@dataclass(frozen=True)
class Rounding:
    """How a tensor that an adapter has changed was rounded, in sums of squares over its numbers."""

    name: str
    error: float  # what is written less what was merged
    change: float  # what was merged less the base model's
    whole: float  # what was merged


class RequantizedWeights(ConvertedWeights):
    """The source's tensors as they will be written, in the form of its base model's files."""

    def __init__(self, source: WeightSource, *args: Any, verify: bool, **options: Any) -> None:
        """Raises UserError for a source whose base model is not quantized, or not known, and for weights that do not
        have its names and shapes."""
        base = source
        while isinstance(base, EditedWeights):
            base = base.before
        if not isinstance(base, HuggingFaceFolder) or not base.form:
            raise UserError(
                f"--requantize: {base.path} is not in fp8, mxfp4 or int4 as it was published; omit it, or give an "
                "adapter of a model that is"
            )
        self._base, self._recording = base, threading.Lock()
        self._roundings: dict[str, Rounding] = {}
        self._copied: set[str] = set()
        super().__init__(source, *args, verify=verify, **options)
        pieces = list(self.plan_pieces())
        self.nbytes = sum(info.nbytes for info, _ in pieces)
        self._total = self.nbytes * (2 if verify else 1)
        self.quantization = load_json(base.path / "config.json")[QUANTIZATION_CONFIG]
        written = [place[3].partition("/")[0] for _, place in pieces if len(place) > 3]
        omitted = [info.name for info in self.passthrough.unused] if self.passthrough.omits_unused else []
        if self.quantization.get("activation_scheme") == "static":
            raise UserError(
                f"--requantize: {base.path} has scales of activations (activation_scheme=static), which are those of "
                "its own weights; omit it"
            )
        new = [
            info.name
            for info, place in pieces
            if len(place) == 3 and len(info.shape) == 2 and not base.has(info.name) and place[0] != PASSTHROUGH
        ]
        if new:
            raise UserError(
                f"--requantize: '{new[0]}' is not in {base.path}, and loaders would take it for quantized; omit it"
            )
        left = base.list_quantized() - {base.name_in_memory(name) for name in (*written, *omitted)}
        if left:
            raise UserError(
                f"--requantize: '{min(left)}' is quantized in {base.path}, and would be written under another name; "
                "omit it"
            )

    def plan_pieces(self) -> Iterator[tuple[TensorInfo, Place]]:
        """Yield each tensor of the files with the arguments of `read` for it."""
        for info, place in super().plan_pieces():
            parts = self._base.describe_published(info.name)
            if not parts:
                yield info, place
                continue
            if (before := tuple(self._base.describe(info.name).shape)) != info.shape:
                raise UserError(
                    f"--requantize: '{info.name}' is {list(info.shape)}, and {list(before)} in {self._base.path}; "
                    "omit it"
                )
            for end, part in parts.items():
                written = TensorInfo(info.name + end, tuple(part.shape), part.dtype)
                yield written, (*place[:3], f"{info.name}/{end}")

    def read(self, index: int, name: str, place: tuple[int | slice, ...] = (), part: str = "") -> torch.Tensor:
        """Return a tensor as `ConvertedWeights.read` does. part: of a quantized one, its name in the files, "/" and the
        end of the part's name."""
        if not part:
            return super().read(index, name, place)
        whole, _, end = part.partition("/")
        published = self._base.read_published(whole)
        if index != PASSTHROUGH:
            merged, base = super().read(index, name, place), self._base.read(whole)
            if not torch.equal(merged, base):
                quantized = dict(zip(published, self._quantize(whole, merged, tuple(published.values())), strict=True))
                if whole not in self._roundings:
                    self._record(whole, merged, base, quantized)
                return quantized[end]
        self._copied.add(whole)
        return published[end]

    def list_stored(
        self, index: int, name: str, place: tuple[int | slice, ...] = (), part: str = ""
    ) -> list[tuple[tuple[int | slice, ...], torch.Tensor]]:
        if part:
            return [((), self.read(index, name, place, part))]
        return super().list_stored(index, name, place)

    def describe_rounding(self) -> str:
        """Return in words how far what was written is from what was merged."""
        copied = f"{pluralize(len(self._copied), 'tensor')} as in {self._base.path}, bit for bit"
        found = list(self._roundings.values())
        if not found:
            return copied
        worst = max(found, key=lambda each: each.error / each.whole if each.whole else 0)
        error, change, whole = (sum(getattr(each, name) for each in found) for name in ("error", "change", "whole"))
        return (
            f"{pluralize(len(found), 'tensor')} rounded to {self._base.form}: off by {_write_share(error, whole)} of "
            f"what was merged, at most {_write_share(worst.error, worst.whole)} ('{worst.name}'), where the adapter "
            f"has changed them by {_write_share(change, whole)}" + (f"; {copied}" if self._copied else "")
        )

    def _quantize(
        self, name: str, merged: torch.Tensor, published: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, ...]:
        if not merged.isfinite().all():
            raise UserError(
                f"--requantize: '{name}' holds numbers that are not finite; is the adapter damaged, or its base model?"
            )
        return quantize(self._base.quantization, merged, published)

    def _record(self, name: str, merged: torch.Tensor, base: torch.Tensor, parts: dict[str, torch.Tensor]) -> None:
        written = self._base.dequantize(name, parts)
        error, change = _sum_squares(merged, written), _sum_squares(merged, base)
        with self._recording:
            self._roundings[name] = Rounding(name, error, change, _sum_squares(merged))


def _write_share(squares: float, whole: float) -> str:
    return f"{(squares / whole) ** 0.5 if whole else 0:.2%}"


def _sum_squares(tensor: torch.Tensor, other: torch.Tensor | None = None) -> float:
    """Return the sum of squares, of the difference where there is another tensor; a row or an expert at a time."""
    total = 0.0
    for number, row in enumerate(tensor):
        difference = row.float() if other is None else row.float() - other[number].float()
        total += float(difference.square().sum(dtype=torch.float64))
    return total


def quantize(
    quantization: Quantization, weight: torch.Tensor, published: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, ...]:
    """Return the parts of a tensor as a folder stores them. published: parts of one of the same shape, whose shapes and
    dtypes they have."""
    if isinstance(quantization, Fp8):
        return _quantize_fp8(weight, quantization.block or (weight.shape[-2], weight.shape[-1]), published[1])
    if isinstance(quantization, Int4):
        return *_quantize_int4(weight, published[1].dtype), published[2]
    return _quantize_mxfp4(weight)


def _quantize_fp8(
    weight: torch.Tensor, block: tuple[int, int], published: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight [..., R, C] in float8_e4m3fn, and its scales as those that are published: numbers, or powers of
    two, which are rounded up."""
    if weight.dim() > 2:
        found = [_quantize_fp8(*pair) for pair in zip(weight, [block] * len(weight), published, strict=True)]
        codes, scales = map(torch.stack, zip(*found, strict=True))
        return codes, scales
    rows, columns = block
    beyond = (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows)  # blocks that are cut at the edge
    blocks = pad(weight.float(), beyond).unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # [R', rows, C', columns]
    most = blocks.abs().amax(dim=(1, 3))
    wide = torch.where(most == 0, 1.0, most / _FP8_MAX)
    if published.dtype == torch.uint8 or published.dtype == torch.float8_e8m0fnu:
        exponents = wide.log2().ceil().clamp(-127, 127)
        scales = (exponents + 127).to(torch.uint8).view(published.dtype)
        wide = exponents.exp2()
    else:
        # Loaders that take ue8m0 for granted (`scale_fmt`) drop all but the exponent, also of scales in fp32
        is_power = bool((published.float().frexp().mantissa == 0.5).all())
        scales = (wide.log2().ceil().exp2() if is_power else wide).to(published.dtype)
        wide = scales.float()
    codes = (blocks / wide[:, None, :, None]).clamp_(-_FP8_MAX, _FP8_MAX).flatten(2).flatten(0, 1)
    return codes[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn), scales.view(published.shape)


def _quantize_mxfp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight [E, 32 x groups, rows] as blocks [E, rows, groups, 16] and exponents [E, rows, groups], uint8: of
    the least power of two with which no number of a group is beyond 6, and the one below it, that with less error."""
    found = []
    for expert in weight:
        groups = expert.t().float().contiguous().unflatten(1, (-1, 32))
        least = (groups.abs().amax(dim=2) / _FP4[-1]).log2().ceil().clamp(-126, 127)
        higher, lower = (_round_fp4(groups, least - step) for step in (0, 1))
        errors = [
            (numbers * (least - step).exp2().unsqueeze(2) - groups).square().sum(dim=2)
            for step, (_, numbers) in enumerate((higher, lower))
        ]
        is_lower = errors[1] < errors[0]
        codes = torch.where(is_lower.unsqueeze(2), lower[0], higher[0])
        exponents = (least - is_lower.float() + 127).to(torch.uint8)
        found.append(((codes[..., ::2] | codes[..., 1::2] << 4), exponents))
    blocks, scales = map(torch.stack, zip(*found, strict=True))
    return blocks, scales


def _round_fp4(groups: torch.Tensor, exponents: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of groups [..., 32] over powers of two [...], uint8, and the numbers that they stand for."""
    scaled = groups * (-exponents).exp2().unsqueeze(-1)
    codes = torch.bucketize(scaled.abs(), (_FP4[1:] + _FP4[:-1]) / 2)
    return (codes | (scaled < 0).long() << 3).to(torch.uint8), _FP4[codes].copysign(scaled)


def _quantize_int4(weight: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return weight [R, C] as int32 [R, C / 8], the lowest bits first, and scales [R, C / 32] in `dtype`."""
    groups = weight.float().unflatten(1, (-1, int4.GROUP))
    most = groups.abs().amax(dim=2)
    scales = torch.where(most == 0, 1.0, most / _INT4_STEPS).to(dtype)
    codes = (groups / scales.float().unsqueeze(2)).round().clamp(-8, 7).flatten(1).long() + 8
    shifts = torch.arange(0, 32, 4)
    return (codes.unflatten(1, (-1, 8)) << shifts).sum(dim=2).to(torch.int32), scales
