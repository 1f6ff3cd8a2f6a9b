"""The weight converter: a Hugging Face model into a pipeline checkpoint, and back.

    python convert2ckpt.py --model_name_or_path HF_DIR --output_dir CKPT_DIR
    python convert2ckpt.py --to_hf --model_name_or_path CKPT_DIR --output_dir HF_DIR
    python convert2ckpt.py --engine vllm --model_name_or_path PEFT_DIR --output_dir DIR

It streams: a model of any size converts on a machine that holds one of its layers. The work is in
`models/conversion/convert.py`.
"""

from __future__ import annotations

import argparse
import gc
import re
import signal
import sys
from contextlib import nullcontext
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # which PYTHONSAFEPATH leaves out
from console import progress
from errors import UserError, explain_refusal
from interpreter import check_interpreter
from models.adapters.engines import ENGINES
from models.conversion.convert import DTYPES, WriteOptions, convert_to_pipeline, export_hugging_face
from models.conversion.engine_adapter import export_for_engine
from models.storage.folders import check_output_dir, check_replaceable, has_tokenizer, hold_run_lock
from models.weights.passthrough import find_passthrough
from models.weights.pipeline_checkpoint import PipelineCheckpoint
from models.weights.sources import open_weights
from models.weights.vocabulary import SpecialTokens

TRUST_HELP = "accept a checkpoint without a manifest.json, and an adapter with another base model than its own"
SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def main() -> int:
    """Returns the exit code: 0, or 1 after one line on stderr that says what to fix."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # leave through the code that cleans up
    try:
        check_interpreter()
        convert(build_parser().parse_args())
    except (UserError, OSError) as error:
        reason = error if isinstance(error, UserError) else explain_refusal(error)
        if reason is None:
            raise
        print(f"error: {reason}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


def convert(args: argparse.Namespace) -> None:
    """Checks the command line, then converts. Raises UserError."""
    tokens = SpecialTokens(args.bos_token, args.eos_token, args.pad_token, tuple(args.add_special_tokens))
    if args.to_hf and tokens:
        raise UserError("special tokens are added on the way to a pipeline checkpoint; omit them with --to_hf")
    if args.unpad_vocab and not args.to_hf:
        raise UserError("--unpad_vocab goes with --to_hf")
    if args.to_hf and args.pad_vocab_to_multiple_of != 1:
        raise UserError(
            "the vocabulary is padded on the way to a pipeline checkpoint; omit --pad_vocab_to_multiple_of with --to_hf"
        )
    if args.requantize and (not args.to_hf or args.dtype):
        raise UserError("--requantize goes with --to_hf, without --dtype: the base model's files say the dtypes")
    if args.workers < 1:
        raise UserError(f"--workers {args.workers}: at least 1")
    if args.engine is not None:
        check_engine_options(args, bool(tokens))
    max_shard_size = parse_size(args.max_shard_size)
    with hold_run_lock(args.output_dir) if args.overwrite else nullcontext():
        write(args, tokens, max_shard_size)


def check_engine_options(args: argparse.Namespace, has_tokens: bool) -> None:
    """Raises UserError for an option that --engine does not have: it moves an adapter's numbers and changes none."""
    others = {
        "--to_hf": args.to_hf,
        "--dtype": args.dtype,
        "--pad_vocab_to_multiple_of": args.pad_vocab_to_multiple_of != 1,
        "--verify": args.verify,
        "--requantize": args.requantize,
        "--no_export_unused": args.no_export_unused,
        "special tokens": has_tokens,
    }
    if given := next((name for name, value in others.items() if value), None):
        raise UserError(f"--engine writes an adapter as it is, in another form; omit {given}")


def write(args: argparse.Namespace, tokens: SpecialTokens, max_shard_size: int) -> None:
    """Reads the source and writes the folder. Raises UserError."""
    check_output_dir(args.output_dir, args.overwrite)  # before the hub is asked for a hundred gigabytes
    check_replaceable(args.output_dir)
    if args.engine is not None:
        notes = export_for_engine(
            args.model_name_or_path, args.output_dir, args.engine, args.trust_remote_code, args.trust_checkpoint
        )
        print("\n".join([*notes, f"wrote {args.output_dir}, for {args.engine} {ENGINES[args.engine].release}"]))
        return
    source = open_weights(args.model_name_or_path, args.trust_remote_code, args.trust_checkpoint)
    if not args.to_hf and isinstance(source, PipelineCheckpoint):
        raise UserError(f"{args.model_name_or_path} is a pipeline checkpoint already; pass --to_hf to go back")
    if not has_tokenizer(source.path):
        print(f"warning: {source.path} holds no tokenizer, so {args.output_dir} will hold none", file=sys.stderr)
    with progress("converting", unit="B") as bar:
        options = WriteOptions(
            dtype=DTYPES.get(args.dtype),
            overwrite=args.overwrite,
            workers=args.workers,
            verify=args.verify,
            export_unused=not args.no_export_unused,
            requantize=args.requantize,
            progress=bar.reach,
        )
        rounding = ""
        if args.to_hf:
            rounding = export_hugging_face(
                source, args.output_dir, options, max_shard_size=max_shard_size, unpad_vocab=args.unpad_vocab
            )
        else:
            convert_to_pipeline(
                source,
                args.output_dir,
                options,
                special_tokens=tokens,
                pad_vocab_to_multiple_of=args.pad_vocab_to_multiple_of,
                trust_remote_code=args.trust_remote_code,
            )
    passthrough = find_passthrough(source, not args.no_export_unused)
    if unused := passthrough.describe_unused():
        print(f"{'omitted' if passthrough.omits_unused else 'passed through unchanged'}: {unused}")
    if rounding:
        print(rounding)
    verified = (
        "; every tensor read back is what was written" if rounding else "; every tensor read back is the source's"
    )
    print(f"wrote {args.output_dir}" + (verified if args.verify else ""))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model_name_or_path",
        required=True,
        metavar="DIR",
        help="folder or hub id; with --to_hf a converted or trained one",
    )
    parser.add_argument(
        "--output_dir", required=True, type=Path, metavar="DIR", help="made new; appears when it is whole"
    )
    parser.add_argument("--to_hf", action="store_true", help="from a pipeline checkpoint to a Hugging Face folder")
    parser.add_argument(
        "--engine",
        choices=sorted(ENGINES),
        help="write the adapter of a peft folder, such as a LoRA run's hf/, in the form in which this engine serves it",
    )
    parser.add_argument(
        "--dtype", choices=sorted(DTYPES), help="of the written weights; by default each tensor keeps its own"
    )
    parser.add_argument(
        "--max_shard_size",
        default="5GB",
        metavar="SIZE",
        help="with --to_hf: of a safetensors file (default: %(default)s)",
    )
    parser.add_argument(
        "--pad_vocab_to_multiple_of",
        type=int,
        default=1,
        metavar="N",
        help="further rows of embedding and head, such as a GPU likes them",
    )
    parser.add_argument("--unpad_vocab", action="store_true", help="with --to_hf: omit those rows again")
    parser.add_argument(
        "--workers",
        type=int,
        default=1,
        metavar="N",
        help="layers (with --to_hf: shards) that are written at once; each takes a layer's memory",
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="read every tensor back from the disk and compare it with the source, bit by bit",
    )
    parser.add_argument(
        "--requantize",
        action="store_true",
        help="with --to_hf and an adapter: in the form in which its base model is published (fp8, mxfp4, int4)",
    )
    parser.add_argument(
        "--no_export_unused",
        action="store_true",
        help="omit the weights that no layer reads, such as layers that predict further tokens",
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace OUTPUT_DIR, once the new one is whole; it must hold nothing but a conversion or a run's export",
    )
    parser.add_argument(
        "--trust_remote_code", action="store_true", help="accept a folder that brings code; it is never run"
    )
    parser.add_argument("--trust_checkpoint", action="store_true", help=TRUST_HELP)
    tokens = parser.add_argument_group(
        "special tokens",
        "Added where the tokenizer does not know them. Where the embedding has no spare rows it grows, and the head\n"
        "too; a new row is the mean of the old ones, computed in fp32. config.json and generation_config.json get\n"
        "the new vocabulary size and ids.",
    )
    tokens.add_argument("--add_special_tokens", nargs="+", default=[], metavar="TOKEN", help="further special tokens")
    for name in ("bos", "eos", "pad"):
        tokens.add_argument(f"--{name}_token", metavar="TOKEN", help=f"becomes the model's {name} token")
    return parser


def parse_size(text: str) -> int:
    """Returns the bytes of "5GB", "500MB", "2GiB" or a plain number. Raises UserError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?I?B?)", text.strip().upper())
    if match is None or match[2] not in SIZE_UNITS or float(match[1]) * SIZE_UNITS[match[2]] < 1:
        raise UserError(f"--max_shard_size '{text}' is not a valid size; write for instance 5GB or 500MB")
    return int(float(match[1]) * SIZE_UNITS[match[2]])


if __name__ == "__main__":
    gc.freeze()  # what is imported is not garbage: to look through it at the end takes a second
    sys.exit(main())
