"""A Python that cannot run the commands ends in one line, and one whose environment is unusual runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CHECK = "from interpreter import check_interpreter; check_interpreter()"


def run(code: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", code], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.parametrize(
    "options, environment, message",
    [
        (
            (),
            {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
            "this Python reads and writes text as ANSI_X3.4-1968, by its locale, and configs and data are UTF-8; set "
            "PYTHONUTF8=1, or a locale such as LC_ALL=C.UTF-8",
        ),
        (
            ("-OO",),
            {},
            "python -OO (PYTHONOPTIMIZE=2) drops docstrings, which torch and transformers build code from; start it "
            "without",
        ),
        ((), {"LC_ALL": "C"}, ""),  # Python switches to UTF-8
        (("-O",), {}, ""),
    ],
)
def test_a_python_that_cannot_run_them_is_one_line(
    options: tuple[str, ...], environment: dict[str, str], message: str
) -> None:
    ended = run(CHECK, *options, **environment)
    assert ended.stderr.strip().rpartition("\n")[2].removeprefix("errors.UserError: ") == message


WORKER = """
import multiprocessing, tempfile
from interpreter import check_interpreter
def answer(queue):
    queue.put("here")
if __name__ == "__main__":
    check_interpreter()
    context = multiprocessing.get_context("forkserver")
    queue = context.Queue()
    context.Process(target=answer, args=(queue,)).start()
    print(queue.get(timeout=60), tempfile.gettempdir())
"""


def test_workers_start_with_a_long_temporary_folder(tmp_path: Path) -> None:
    folder, program = tmp_path / ("x" * 120), tmp_path / "program.py"
    folder.mkdir()
    program.write_text(WORKER)
    environment = {**os.environ, "TMPDIR": str(folder), "PYTHONPATH": str(ROOT)}
    ended = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, env=environment)
    assert ended.stdout.split() == ["here", str(folder)], ended.stderr


@pytest.mark.parametrize("program", ["convert2ckpt.py", "trainer_base_ds_mp.py"])
def test_the_commands_find_their_modules_without_the_folder_of_the_program(program: str, tmp_path: Path) -> None:
    code = f"import runpy; runpy.run_path({str(ROOT / program)!r}, run_name='imported')"
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
