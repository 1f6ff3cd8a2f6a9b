"""Worker processes that map a function over a stream, in its order."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from errors import UserError

Item = TypeVar("Item")
Result = TypeVar("Result")
PENDING_PER_PROCESS = 2  # enough that no process waits for work, few enough to bound memory

_function: Callable[[Any], Any]  # that of this worker


def map_in_order(function: Callable[[Item], Result], items: Iterable[Item], num_processes: int) -> Iterator[Result]:
    """Yield `function(item)` in order. `num_processes` forked processes inherit the function; with one, it runs here.

    They may be forked from a process that has started CUDA, as those of torch's DataLoader are: none of them may touch
    a GPU.

    Exceptions of `function` are raised here. Raises UserError when a process was killed.
    """
    if num_processes == 1:
        yield from map(function, items)
        return
    pool = ProcessPoolExecutor(num_processes, multiprocessing.get_context("fork"), _start, (function,))
    pending: deque[Future[Result]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(_work, item))
            if len(pending) == PENDING_PER_PROCESS * num_processes:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool:
        _end_feeding(pool)
        raise UserError("a process that tokenizes was killed, usually out of memory; lower data.num_proc") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _end_feeding(pool: ProcessPoolExecutor) -> None:
    """Close the reading end of a broken pool's pipe: a thread may be writing to it, and Python before 3.11.5 waits for
    that forever (CPython gh-94777; seen with 3.11.2). Without a reader the write fails.
    """
    manager: Any = pool._executor_manager_thread
    queue: Any = vars(pool)["_call_queue"]  # not declared by its type stubs
    manager.join(timeout=1)  # newer versions close the reader themselves, which must not happen twice
    if manager.is_alive():
        queue._reader.close()


def _start(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    os.environ["TOKENIZERS_PARALLELISM"] = (
        "false"  # one thread per process, and no warning that threads did not survive the fork
    )
    signal.set_wakeup_fd(-1)  # a parent that listens for signals must not take those of its workers for its own
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if callable(signal.getsignal(signum)):  # the parent's
            signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends the workers
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this worker when its parent does: it would wait forever for work from a parent that was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(item: Any) -> Any:
    return _function(item)
