"""Known causes, by the sources' own code, notes or figures, of what the plan misses."""

from __future__ import annotations

from benchmarks.published_parts.rows import PublishedRun

UNKNOWN = "no cause found"


def find_speed_cause(run: PublishedRun) -> str:
    """Return why a run is faster or slower than planned."""
    if run.source == "nanotron":
        return "hosts read the shapes of what their stages receive from the GPU (p2p.py)" if run.has_stages else UNKNOWN
    if run.zero == 3 and run.gpus >= 512:
        return "how weights are gathered over as many ranks is not stated"
    if run.source.startswith("dlperf") and (run.tp or 1) > run.gpus_per_node:
        return "tensor parallelism over a network of 1.6 GB/s for each GPU"
    if run.source == "bigscience_v100":
        return "its source calls its figures correct to within 40%"
    if run.source == "aleph_alpha" and run.gpus == 256:
        return "its network of 200 Gb/s may be that of a node, not of a GPU"
    if run.hidden and run.heads and run.hidden // run.heads % 8:
        return "heads of a width that tensor cores do not take (source: a third slower)"
    return UNKNOWN


def find_memory_cause(source: str, memory_is: str) -> str:
    """Return why the runs of a source take more or less memory than planned."""
    return _MEMORY.get((source, memory_is), UNKNOWN)


_MEMORY = {
    ("bigscience_176b", "process"): "38 and 44 GB on one layout; NCCL's buffers are not stated",
    ("dlperf_oneflow", "process"): "with stages: its schedule is not stated",
    ("kempner", "allocated"): "two GPUs: the script that made its report has micro-batches of 2, the report of 4",
    ("nanotron", "allocated"): "whether what tensor parallelism gathers is kept depends on its version, not stated",
    ("vocabulary_parallel", "reserved"): "one layout reserved 1.39 times what it allocated",
}
