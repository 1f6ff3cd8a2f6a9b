"""Follows a line of the train file through a real run: which of the project's functions it passes on its way to the
loss, and what is on the stack above a layer's forward pass.

A function is passed when it is called with, or returns, what came of the line: its text, its token ids, or in a step a
tensor that has the length of its row in its shape, which nothing else in the run may have.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import threading
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch
from support.launching import ROOT, SECONDS
from support.workers import FORKSERVER, free_port, redirect_output

from batch import Batch, Inputs, Targets

_MOST_CHECKS = 2000  # of a function that nothing of the line has passed so far
_MOST_ITEMS = 64  # of a list
_LAYERS = ("models/layers/", "models/families/", "models/heads/")
_COMPREHENSIONS = ("<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")


@dataclass(frozen=True)
class Line:
    """How what comes of a line of the train file is recognized."""

    text: str  # a part of the line
    ids: tuple[int, ...]  # the tokens of that part
    length: int  # the length of its row in a micro-batch, with padding

    def is_in(self, value: Any, by_shape: bool, depth: int = 4) -> bool:
        """Return whether a value holds what came of the line. by_shape: whether the length of its row shows that."""
        if isinstance(value, (str, bytes)):
            return (self.text if isinstance(value, str) else self.text.encode()) in value  # type: ignore[operator]
        if isinstance(value, torch.Tensor):
            return by_shape and self.length in value.shape[:2]
        if isinstance(value, np.ndarray):
            return value.dtype.kind in "iu" and self._has_ids(value.reshape(-1).tolist())
        if isinstance(value, (list, tuple, array)) and value and isinstance(value[0], (int, np.integer)):
            return self._has_ids(value)
        if depth == 0 or isinstance(value, type):
            return False
        if is_dataclass(value):
            return self.is_in(vars(value), by_shape, depth)
        parts = value.values() if type(value) is dict else value if isinstance(value, (list, tuple)) else ()
        return any(self.is_in(each, by_shape, depth - 1) for each in islice(parts, _MOST_ITEMS))

    def _has_ids(self, numbers: Sequence[int]) -> bool:
        size = len(self.ids)
        starts = (start for start, number in enumerate(numbers) if number == self.ids[0])
        return any(tuple(numbers[start : start + size]) == self.ids for start in starts)


@dataclass(frozen=True)
class Trace:
    """functions: file and name of each that was passed, in the order of the first passing: on the first stage, then on
    the others those that are not passed before. stacks: the project's frames above each forward pass of a layer. step:
    the files whose functions the first step calls, on any stage."""

    functions: list[tuple[str, str]]
    stacks: list[list[str]]
    step: set[str]

    @property
    def files(self) -> list[str]:
        return list(dict.fromkeys(file for file, _ in self.functions))


class Tracer:
    """Records the line until the first backward pass, and files until the end of the first step."""

    def __init__(self, line: Line) -> None:
        self._line, self._checks = line, Counter[CodeType]()
        self._files: dict[CodeType, str | None] = {}  # None: nothing to record
        self._trains = False  # before that, the plan runs layers on rows of any length
        self._is_done = self._in_step = False
        self._in_files: set[CodeType] = set()  # functions of the step whose file is noted
        self.functions: list[tuple[str, str]] = []
        self.stacks: list[list[str]] = []
        self.step: set[str] = set()

    def start(self) -> None:
        threading.setprofile(self.profile)
        sys.setprofile(self.profile)

    def profile(self, frame: FrameType, event: str, returned: Any) -> None:
        if event not in ("call", "return"):
            return
        code = frame.f_code
        if code.co_qualname == "TrainingLoop._take_step":
            self._in_step = event == "call"
        if self._in_step and event == "call" and code not in self._in_files:
            self._in_files.add(code)
            self.step |= {file} if (file := self._find_file(code)) is not None else set()
        if self._is_done:
            if not self._in_step:
                threading.setprofile(None)  # type: ignore[arg-type]
                sys.setprofile(None)
            return
        file = self._files.get(code, "")
        if file == "":
            file = self._files[code] = self._find_file(code)
        if file is None:
            return
        if code.co_qualname == "TrainingLoop.run":
            self._trains = True
        if self._trains and event == "call" and file.startswith(_LAYERS) and code.co_name == "forward":
            self.stacks.append(list(self._list_frames(frame.f_back)))
        if code.co_qualname == "Runner._backward":
            self._is_done = True
            return
        self._checks[code] += 1
        if self._checks[code] > _MOST_CHECKS:
            return
        values = list(_list_arguments(frame)) if event == "call" else [returned]
        if any(self._line.is_in(value, self._trains) for value in values):
            self.functions.append((file, code.co_qualname))
            if code.co_name != "forward":
                self._files[code] = None

    def _find_file(self, code: CodeType) -> str | None:
        path = Path(code.co_filename)
        if not path.is_relative_to(ROOT) or code.co_name in _COMPREHENSIONS:
            return None
        file = str(path.relative_to(ROOT))
        return None if file.startswith(("tests/", ".")) else file

    def _list_frames(self, frame: FrameType | None) -> Iterator[str]:
        while frame is not None:
            file = self._find_file(frame.f_code)
            if file is not None:
                yield f"{file}: {frame.f_code.co_qualname}"
            frame = frame.f_back


def _list_arguments(frame: FrameType) -> Iterator[Any]:
    """Yield what a function is called with; of a method without its object, unless that is data itself."""
    code, values = frame.f_code, frame.f_locals
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & 4) + bool(code.co_flags & 8)
    for name in code.co_varnames[:count]:
        if name in values and (name != "self" or isinstance(values[name], (tuple, Inputs, Targets, Batch))):
            yield values[name]


def trace_run(line: Line, arguments: Sequence[str], folder: Path, world_size: int) -> Trace:
    """Run the trainer in forks of a process that has imported what it needs, one for each rank."""
    port = str(free_port())
    processes = [
        FORKSERVER.Process(target=_run_rank, args=(line, list(arguments), folder, rank, world_size, port))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(SECONDS)
        process.kill()
    logs = "".join((folder / f"rank_{rank}.log").read_text()[-3000:] for rank in range(world_size))
    assert [process.exitcode for process in processes] == [0] * world_size, logs
    found = [json.loads((folder / f"trace_{rank}.json").read_text()) for rank in range(world_size)]
    functions = dict.fromkeys((file, name) for each in found for file, name in each["functions"])
    step = {file for each in found for file in each["step"]}
    return Trace([*functions], [stack for each in found for stack in each["stacks"]], step)


def _run_rank(line: Line, arguments: list[str], folder: Path, rank: int, world_size: int, port: str) -> None:
    redirect_output(folder / f"rank_{rank}.log")
    sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in sizes.items()}, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    os.chdir(folder)
    sys.argv = [str(ROOT / "trainer_base_ds_mp.py"), *arguments]
    tracer = Tracer(line)
    tracer.start()
    runpy.run_path(sys.argv[0], run_name="__main__")
    found = {"functions": tracer.functions, "stacks": tracer.stacks, "step": sorted(tracer.step)}
    (folder / f"trace_{rank}.json").write_text(json.dumps(found))
