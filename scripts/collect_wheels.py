"""Collects what requirements.txt asks for as wheels, for a machine with torch and a GPU but without internet.

    python scripts/collect_wheels.py --python-version 3.12 --torch 2.11.0 --output_dir wheels
    python scripts/collect_wheels.py ... --without pyarrow,pandas          what the machine has already, to save space
    python scripts/collect_wheels.py ... --drop wandb                      requirements that are not wanted there
    python scripts/collect_wheels.py ... --add bitsandbytes                optional packages that are wanted there

uv (`pip install uv`) resolves everything that the requirements need, for that Python and that torch, and pip downloads
it; torch itself and the CUDA libraries that come with it stay out. What is published as source only (deepspeed) is
built here, without compiled parts. At the end: how much it is, and the command that installs it there, which does not
touch torch.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements.txt"
_WITH_TORCH = re.compile(r"torch$|triton$|pytorch-triton|nvidia-|cuda-")  # comes with torch's own build
_GLIBC = range(39, 4, -1)  # minor versions, the newest first: pip matches the number of a platform exactly


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
    python, machine, folder = arguments.python_version, arguments.machine, arguments.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        sys.exit(f"{folder} is not empty, and two versions of a package end an installation")
    wanted = list_requirements(arguments.torch, arguments.drop.split(","), arguments.add.split(","))
    options = [f"--python-version={python}", f"--python-platform={machine}-manylinux_2_{max(_GLIBC)}"]
    resolved = run("uv", "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate", *options, given=wanted)
    pins = choose(resolved.splitlines(), arguments.without.split(","))
    platforms = [f"--platform=manylinux_2_{minor}_{machine}" for minor in _GLIBC]
    options = [f"--python-version={python}", *platforms, f"--platform=manylinux2014_{machine}"]
    run("pip", "download", "--quiet", "--no-deps", f"--dest={folder}", *options, *pins)
    build_sources(folder)
    print(describe(folder))


def list_requirements(torch_version: str, drop: Sequence[str], add: Sequence[str]) -> list[str]:
    """Returns the lines of requirements.txt for a machine with another torch, without the packages of `drop` and with
    those of `add`."""
    lines = [line for line in REQUIREMENTS.read_text().splitlines() if line and not line.startswith("#")]
    return [*choose(lines, ["torch", *drop]), f"torch=={torch_version}", *(name for name in add if name)]


def choose(pins: Sequence[str], without: Sequence[str]) -> list[str]:
    """Returns the pinned requirements that neither come with torch nor are among the packages of `without`."""
    left_out = {_normalize(name) for name in without if name}
    names = [_normalize(pin.partition("==")[0]) for pin in pins]
    return [pin for pin, name in zip(pins, names) if not _WITH_TORCH.match(name) and name not in left_out]


def _normalize(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def build_sources(folder: Path) -> None:
    """Replaces each source archive in `folder` by a wheel. Ends the script where one would fit this machine only."""
    for source in sorted([*folder.glob("*.tar.gz"), *folder.glob("*.zip")]):
        print(f"building {source.name}: it is published as source only", flush=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            run("pip", "wheel", "--quiet", "--no-deps", f"--wheel-dir={scratch}", str(source))
            (wheel,) = Path(scratch).iterdir()
            if not wheel.name.endswith("-none-any.whl"):
                sys.exit(f"{source.name}: there is no wheel, and one built here fits this machine only")
            wheel.rename(folder / wheel.name)
        source.unlink()


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


def run(module: str, *words: str, given: Sequence[str] = ()) -> str:
    """Runs `python -m module` with the lines `given` as its input, and returns its output. Ends the script where that
    fails, with the end of what it has printed."""
    ended = subprocess.run(
        [sys.executable, "-m", module, *words], input="\n".join(given), capture_output=True, text=True
    )
    if ended.returncode:
        sys.exit("\n".join([f"{module}:", *ended.stderr.strip().splitlines()[-5:]]))
    return ended.stdout


if __name__ == "__main__":
    main()
