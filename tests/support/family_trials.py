"""A family on trial: a small model as published, here and by `transformers`. And processes that try many of them.

A trial that hangs, crashes, or takes all memory is the end of its process, and of nothing else.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from support.cases import Case, merge, train_case, train_oracle, worst_difference
from support.published import build_published_config
from support.tiny import save_records, save_tokenizer
from support.workers import WorkerError, WorkerGroup, redirect_output
from transformers import PretrainedConfig, PreTrainedModel

from models.layers.wrapped import TEXT_CONFIG

BOUND = 1e-5
STAGES, DIVIDED = (2, 1), (1, 2)  # layouts of two ranks: num_stages, expert_parallel_size
SECONDS = 180.0  # of one family: jamba takes 34 of a core
_ROUTER = re.compile(r"router|gate[.](weight|wg)|classifier")
_SCORES = re.compile(r"[qk]_(layer)?norm[.]weight")  # by which scores are as large whatever the matrices
_CONTEXT = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Trial:
    """The result of a trial. how: "file", "generic" or "refused". gradients: the largest relative difference of the
    loss and of all gradients, in fp64. steps: of losses, norms and weights of five SGD steps on two stages, in fp32.
    divided: the same on two ranks that divide the experts. Both are None where they were not run. is_stacked: False for
    experts that cannot be divided. reason: why it is refused."""

    how: str
    gradients: float | None = None
    steps: float | None = None
    divided: float | None = None
    is_stacked: bool = True
    reason: str = ""


def try_family(model_type: str) -> Trial:
    """Loss and gradients."""
    from models.architecture.lookup import ARCHITECTURES, build_layers
    from models.generic.family import find_fault, list_attention
    from models.generic.proof import compare_with_transformers
    from models.generic.shrink import shrink

    try:
        config = build_published_config(model_type)
    except Exception as error:
        return Trial("refused", reason=f"transformers makes no default config of it: {_word(error)}")
    if hasattr(config, TEXT_CONFIG):
        return _try_wrapped(config)
    own = model_type in ARCHITECTURES
    if not own and (fault := find_fault(config)):
        return Trial("refused", reason=fault)
    try:
        small = shrink(config)
        small._attn_implementation = "eager" if own else list_attention(config)[0]
        worst = compare_with_transformers(small, build_layers)[0]
    except Exception as error:
        return Trial("refused", reason=_word(error))
    if worst < BOUND:
        return Trial("file" if own else "generic", worst)
    return Trial("refused", worst, reason=f"gradients differ by {worst:.0e}")


def _try_wrapped(config: PretrainedConfig) -> Trial:
    """Given text alone, the class of `transformers` around a text model against the layers of that."""
    from models.architecture.lookup import build_layers
    from models.generic.shrink import shrink
    from models.generic.wrapped_proof import compare_with_wrapped
    from models.layers.wrapped import unwrap

    try:
        text, wrapper = unwrap(config)
        assert wrapper is not None
        build_layers(text, wrapper)
        small = shrink(text)
        small._attn_implementation = "eager"
        worst = compare_with_wrapped(small, wrapper, build_layers)[0]
    except Exception as error:
        return Trial("refused", reason=_word(error))
    return Trial(f"wraps `{text.model_type}`", worst)


def try_training(
    model_type: str, ranks: WorkerGroup, folder: Path, layouts: Sequence[tuple[int, int]] = (STAGES, DIVIDED)
) -> list[float | None]:
    """Five SGD steps through the engine on two ranks, by each layout (num_stages, expert_parallel_size): the largest
    relative difference of losses, norms, weights; None where there are no experts to divide."""
    from models.architecture.lookup import build_layers
    from models.experts.sizes import NUM_EXPERTS
    from models.generic.shrink import build_small, shrink
    from models.sharding.expert_parallel import find_stack_sizes

    config = shrink(build_published_config(model_type))
    has_stacks = bool(find_stack_sizes(build_layers(config)))
    for name in config.to_dict():
        if "jitter" in name and getattr(config, name):  # each of two runs would draw for itself
            setattr(config, name, 0.0)
    for name in NUM_EXPERTS:
        if isinstance(count := getattr(config, name, None), int) and count % 2:  # two ranks divide them
            setattr(config, name, count + 1)
    model, _ = build_small(config)
    soften(model)
    model.save_pretrained(folder / "model")
    save_tokenizer(folder / "tokenizer")
    records = save_records(folder / "train.jsonl", 40)
    keys = (f"tokenizer_name_or_path={folder}/tokenizer", "learning_rate=0.05", "max_grad_norm=1")
    oracle, found = None, list[float | None]()
    for num_stages, size in layouts:
        if size > 1 and not has_stacks:
            found.append(None)
            continue
        given = (*keys, f"expert_parallel_size={size}")
        case = Case(folder / "model", records, folder, num_stages, 2, overrides=given)
        result = merge(ranks.run(train_case, case))
        oracle = oracle or train_oracle(case)  # once the ranks have tokenized
        found.append(_compare(result, oracle))
    return found


def _is_mixture(model_type: str) -> bool:
    from models.experts.sizes import count_experts
    from models.generic.shrink import shrink

    return count_experts(shrink(build_published_config(model_type))) != (1, 1)


def _compare(result: dict[str, Any], oracle: dict[str, Any]) -> float:
    return max(
        worst_difference(result["weights"], oracle["weights"])[0],
        *(
            abs(ours / theirs - 1)
            for name in ("losses", "norms")
            for ours, theirs in zip(result[name], oracle[name], strict=True)
        ),
    )


@torch.no_grad()
def soften(model: PreTrainedModel) -> None:
    """Weights for fp32: those of a proof in fp64 make so much of a rounding that five steps end elsewhere. Routers stay
    sure of their choices."""
    for name, parameter in model.named_parameters():
        if _SCORES.search(name) or (parameter.ndim > 1 and not _ROUTER.search(name)):
            parameter *= 0.25


def try_families(
    model_types: Iterable[str],
    train: bool = False,
    num_workers: int = 2,
    seconds: float = SECONDS,
    report: Callable[[str, Trial], None] = lambda model_type, trial: None,
    trial: Callable[[str, bool], Trial] | None = None,
) -> dict[str, Trial]:
    """Returns the trials by model_type, in the given order. seconds: of one family, until its process is ended.

    report: is called with each result. trial: what is run instead of trying, of a module that the processes can import.
    """
    waiting, results = deque(model_types), {}
    order = tuple(waiting)
    workers = [_Worker(trial or _try_all) for _ in range(min(num_workers, len(waiting)))]
    try:
        while waiting or any(worker.model_type for worker in workers):
            for worker in workers:
                if worker.model_type is None and waiting:
                    worker.start(waiting.popleft(), train)
            busy = [worker for worker in workers if worker.model_type]
            ready = wait([worker.pipe for worker in busy], timeout=0.2)
            for worker in busy:
                if worker.pipe in ready or worker.seconds() > seconds:
                    model_type = str(worker.model_type)
                    results[model_type] = worker.finish(worker.pipe in ready, seconds)
                    report(model_type, results[model_type])
    finally:
        for worker in workers:
            worker.end()
    return {model_type: results[model_type] for model_type in order}


class _Worker:
    """A process that tries one family after the other; another one, once one of them was its end."""

    def __init__(self, trial: Callable[[str, bool], Trial]) -> None:
        self._trial = trial
        self.model_type: str | None = None
        self._begin()

    def _begin(self) -> None:
        self.pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_work, args=(theirs, self._trial))
        self._process.start()
        theirs.close()
        self._is_up = False

    def start(self, model_type: str, train: bool) -> None:
        if not self._is_up:  # the time of its imports counts for no family
            self.pipe.recv()
            self._is_up = True
        self.model_type, self._since = model_type, time.monotonic()
        self.pipe.send((model_type, train))

    def seconds(self) -> float:
        return time.monotonic() - self._since

    def finish(self, answered: bool, seconds: float) -> Trial:
        self.model_type = None
        reason = f"took longer than {seconds:.0f} s"
        if answered:
            try:
                trial: Trial = self.pipe.recv()
                return trial
            except EOFError:
                self._process.join()
                reason = f"its process ended with exit code {self._process.exitcode}"
        self.end()
        self._begin()
        return Trial("refused", reason=reason)

    def end(self) -> None:
        self.pipe.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)  # with the ranks that it has started
        self._process.kill()
        self._process.join()


def _work(pipe: Connection, trial: Callable[[str, bool], Trial]) -> None:
    os.setsid()
    redirect_output(Path(os.devnull))
    os.environ.update(OMP_NUM_THREADS="1", TRANSFORMERS_VERBOSITY="error")
    import torch
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(1)
    disable_progress_bar()
    pipe.send(None)
    while True:
        try:
            model_type, train = pipe.recv()
        except EOFError:
            os._exit(0)
        pipe.send(trial(model_type, train))


_ranks: list[WorkerGroup] = []  # of this process, once it trains


def _try_all(model_type: str, train: bool) -> Trial:
    found = try_family(model_type)
    if found.how not in ("file", "generic") or not train:  # five steps of a wrapped model are those of its text model
        return found
    with tempfile.TemporaryDirectory() as folder:
        if not _ranks:
            _ranks.append(WorkerGroup(2, Path(tempfile.mkdtemp())))
        try:
            steps, divided = try_training(model_type, _ranks[0], Path(folder))
        except BaseException as error:
            return replace(found, how="refused", reason=f"five steps: {_word(error)}")
    found = replace(found, steps=steps, divided=divided, is_stacked=divided is not None or not _is_mixture(model_type))
    worst = max(figure for figure in (steps, divided) if figure is not None)
    return found if worst < BOUND else replace(found, how="refused", reason=f"five SGD steps differ by {worst:.0e}")


def _word(error: BaseException) -> str:
    """The error; of an error of ranks, the last line of the first stack trace, since others fail on that rank."""
    if isinstance(error, WorkerError):
        first = re.search(r"^(?:errors[.])?(\w+(?:Error|Exception)\b.*)$", str(error), re.MULTILINE)
        return first[1][:200] if first else "a rank ended without an answer"
    lines = str(error).strip().splitlines() or [traceback.format_exception_only(error)[-1]]
    return " ".join(lines[-1].split())
