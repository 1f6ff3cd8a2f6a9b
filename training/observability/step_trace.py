"""`profile_trace=STEP`: torch.profiler around one optimizer step, on every rank.

Each rank writes its trace to `output_dir/traces/rank_N.json.gz` (open it at ui.perfetto.dev or chrome://tracing), and
the main rank a summary of all of them to `output_dir/profile_step_N.txt`. The profiler exists from the start of that
step to its end only; no other step is slowed.
"""

from __future__ import annotations

import gzip
import json
import shutil
from pathlib import Path

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function, supported_activities

from training.distributed.process import has_accelerator
from training.observability.trace_summary import StepProfile, render_profiles, summarize_trace

_ANNOTATION = "optimizer step {}"


class StepTrace:
    """The trace of one step on this rank. All ranks call `start` and `finish`, around the same step."""

    def __init__(self, step: int | None, folder: Path) -> None:
        """step: counted from 1, as in metrics.jsonl; None traces nothing. folder: `output_dir`."""
        self.step, self._folder = step, folder

    def start(self) -> None:
        """Start the profiler and wait until all ranks have: it takes seconds, which would count as part of the
        step."""
        self._profiler = profile(activities=list_activities())
        self._profiler.start()
        self._mark = record_function(_ANNOTATION.format(self.step))
        dist.barrier()
        self._mark.__enter__()

    def finish(self) -> None:
        """Write this rank's trace and, on the main rank, the summary."""
        self._mark.__exit__(None, None, None)
        self._profiler.stop()
        own = self._write()
        del self._profiler  # it holds every event
        profiles: list[StepProfile | None] = [None] * dist.get_world_size()
        dist.all_gather_object(profiles, own)
        if dist.get_rank() == 0:
            text = render_profiles([found for found in profiles if found is not None], self.step or 0)
            (self._folder / f"profile_step_{self.step}.txt").write_text(text)

    def _write(self) -> StepProfile:
        traces = self._folder / "traces"
        traces.mkdir(parents=True, exist_ok=True)
        file = traces / f"rank_{dist.get_rank()}.json"
        self._profiler.export_chrome_trace(str(file))
        with open(file, "rb") as raw, gzip.open(f"{file}.gz", "wb", compresslevel=3) as packed:
            shutil.copyfileobj(raw, packed)
        events = json.loads(file.read_text())["traceEvents"]
        file.unlink()
        return summarize_trace(events, _ANNOTATION.format(self.step))


def list_activities() -> set[ProfilerActivity]:
    """Return the activities to trace. A run on the CPU traces the host only, so that the profiler does not open a
    GPU."""
    return supported_activities() if has_accelerator() else {ProfilerActivity.CPU}
