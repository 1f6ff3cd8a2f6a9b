"""Collects what requirements.txt asks for as wheels, for a machine with torch and a GPU but without internet.

    python scripts/collect_wheels.py --python-version 3.12 --torch 2.11.0 --output_dir wheels
    python scripts/collect_wheels.py ... --without pyarrow,pandas          what the machine has already, to save space
    python scripts/collect_wheels.py ... --drop wandb,tensorboard          requirements that are not wanted there
    python scripts/collect_wheels.py ... --add bitsandbytes                optional packages that are wanted there

Everything that the requirements need is resolved as pip would there, with that torch; torch itself and the CUDA
libraries that come with it stay out. What is published as source only (deepspeed) is built here, without compiled
parts. At the end: how much it is, and the command that installs it there, which does not touch torch.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements.txt"
_WITH_TORCH = re.compile(r"torch$|triton$|pytorch-triton|nvidia-|cuda-")  # comes with torch's own build
_MISSING = re.compile(r"satisfies the requirement ([^\s;]+)")
_GLIBC = range(5, 40)  # minor versions
_MOST_SOURCES = 20


class PipFailed(Exception):
    """pip failed; the message is the end of its output."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python-version", default="3.12", help="of the machine")
    parser.add_argument("--torch", default="2.11.0", help="the version that the machine has")
    parser.add_argument("--machine", default="x86_64", help="what `uname -m` prints there")
    parser.add_argument("--without", default="", help="packages that the machine has already, with commas between")
    parser.add_argument("--drop", default="", help="requirements to leave out, with what only they need")
    parser.add_argument("--add", default="", help="optional packages to collect too, with commas between")
    parser.add_argument("--output_dir", type=Path, default=Path("wheels"))
    arguments = parser.parse_args()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    if any(arguments.output_dir.iterdir()):
        sys.exit(f"{arguments.output_dir} is not empty, and two versions of a package end an installation")
    target = list_target_options(arguments.python_version, arguments.machine)
    try:
        wanted = list_requirements(arguments.torch, arguments.drop.split(","), arguments.add.split(","))
        pins = resolve(wanted, target, arguments.output_dir)
        download(choose(pins, arguments.without.split(",")), target, arguments.output_dir)
    except PipFailed as failure:
        sys.exit(f"pip: {failure}")
    print(describe(arguments.output_dir))


def list_target_options(python_version: str, machine: str) -> list[str]:
    """Returns pip's options for another Python than this one. pip matches the number of a platform exactly."""
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in reversed(_GLIBC)]
    older = [f"--platform=manylinux{name}_{machine}" for name in ("2014", "2010", "1")]
    return [f"--python-version={python_version}", "--implementation=cp", *platforms, *older, "--only-binary=:all:"]


def list_requirements(torch_version: str, drop: Sequence[str], add: Sequence[str]) -> list[str]:
    """Returns the lines of requirements.txt for a machine with another torch, without the packages of `drop` and with
    those of `add`."""
    lines = [line for line in REQUIREMENTS.read_text().splitlines() if line and not line.startswith("#")]
    dropped = {_normalize(name) for name in ("torch", *drop)}
    kept = [line for line in lines if _normalize(line.partition("==")[0]) not in dropped]
    return [*kept, f"torch=={torch_version}", *(name for name in add if name)]


def resolve(requirements: Sequence[str], target: Sequence[str], folder: Path) -> dict[str, str]:
    """Returns package -> version of everything the requirements need. Builds a wheel into `folder` where none is
    published. Raises PipFailed."""
    with tempfile.TemporaryDirectory() as scratch:
        wanted = Path(scratch) / "requirements.txt"
        wanted.write_text("\n".join(requirements))
        options = ["--dry-run", "--ignore-installed", f"--target={scratch}/site", "--quiet", "--report=-"]
        for _ in range(_MOST_SOURCES):
            try:
                report = run_pip("install", *options, *target, f"--find-links={folder}", "-r", str(wanted))
                return read_pins(report)
            except PipFailed as failure:
                missing = _MISSING.search(str(failure))
                if missing is None:
                    raise
                build(missing[1], folder)
    raise PipFailed(f"more than {_MOST_SOURCES} packages have no wheel")


def read_pins(report: str) -> dict[str, str]:
    """Returns package -> version from the report of `pip install --report`."""
    installed = (entry["metadata"] for entry in json.loads(report)["install"])
    return {metadata["name"]: metadata["version"] for metadata in installed}


def build(requirement: str, folder: Path) -> None:
    """Builds a wheel for every Python and machine from source. Raises PipFailed if it fits this machine only."""
    print(f"building {requirement}: it is published as source only", flush=True)
    before = set(folder.iterdir())
    run_pip("wheel", "--no-deps", f"--wheel-dir={folder}", requirement)
    built = set(folder.iterdir()) - before
    if not built or not all(wheel.name.endswith("-none-any.whl") for wheel in built):
        raise PipFailed(f"{requirement}: there is no wheel, and one built here fits this machine only")


def choose(pins: dict[str, str], without: Sequence[str]) -> list[str]:
    """Returns pinned requirements, without the packages that come with torch or that the machine has."""
    left_out = {_normalize(name) for name in without if name}
    return [
        f"{name}=={version}"
        for name, version in sorted(pins.items())
        if not _WITH_TORCH.match(_normalize(name)) and _normalize(name) not in left_out
    ]


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def download(requirements: Sequence[str], target: Sequence[str], folder: Path) -> None:
    run_pip("download", "--no-deps", "--quiet", *target, f"--find-links={folder}", f"--dest={folder}", *requirements)


def describe(folder: Path) -> str:
    """Returns the total size, the largest wheels, and the command that installs them."""
    sizes = sorted(((file.stat().st_size, file.name) for file in folder.glob("*.whl")), reverse=True)
    largest = ", ".join(f"{name.partition('-')[0]} {size / 2**20:.0f}" for size, name in sizes[:5])
    return "\n".join(
        [
            f"{len(sizes)} wheels, {sum(size for size, _ in sizes) / 2**20:.0f} MiB ({largest}) in {folder}",
            f"there: python3 -m pip install --no-index --no-deps --no-compile {folder}/*.whl",
            "or, where Python's own folder is read-only: add --target SITE, and export PYTHONPATH=SITE",
        ]
    )


def run_pip(*words: str) -> str:
    """Runs pip and returns its output. Raises PipFailed."""
    ended = subprocess.run([sys.executable, "-m", "pip", *words], capture_output=True, text=True)
    if ended.returncode:
        raise PipFailed("\n".join(ended.stderr.strip().splitlines()[-5:]))
    return ended.stdout


if __name__ == "__main__":
    main()
