"""The output that a person sees: on terminals of several widths, in a log file, and mixed with library output."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

import console
from scripts.capture_screen import Capture, capture, replay

ROOT = Path(__file__).resolve().parents[1]
PATH = "outputs/a/folder/that/is/named/at/some/length/global_step100"
RUN = """
    import time
    import console
    from console import Progress, progress, say, say_last, show_panel

    show_panel("demo: training on 2 ranks", {"layout": "pp2 x dp1 = 2 ranks; " + 12 * "word ", "checkpoint": "PATH"})
    run = Progress("step", 4, stays=True)
    for step in range(1, 4):
        with progress("evaluating", 3, "micro-batches") as evaluating:
            for _ in evaluating.follow(range(3)):
                time.sleep(0.11)
        say(f"step {step}: eval_loss 1.5")
        run.reach(step)
        run.note("loss 2.5, lr 1.00e-03, 1,234 tokens/s")
        with progress("saving", unit="B") as saving:
            time.sleep(0.11)
            saving.reach(5e8, 1e9)
            saving.reach(1e9, 1e9)
    with progress("quiet", 10, shown=False) as quiet:
        quiet.advance(10)
    say_last("\\nerror: " + 30 * "much went wrong ")
"""


def show(width: int) -> Capture:
    return capture([sys.executable, "-c", textwrap.dedent(RUN).replace("PATH", PATH)], width, ROOT)


@pytest.mark.parametrize("width", [40, 80, 160])
def test_on_a_terminal_all_fits_and_one_bar_is_to_be_seen(width: int) -> None:
    shown = show(width)
    assert shown.code == 0 and not [line for line in shown.lines if len(line) > width and PATH not in line]
    assert "\x1b[A" not in shown.written  # a second bar would be on its own line
    assert (
        sum(
            line.startswith(("step 0/", "step 1/", "step 2/", "step 3/", "evaluating", "saving"))
            for line in shown.lines
        )
        == 1
    )
    assert all(text in shown.written for text in ("evaluating 0/3 micro-batches", "saving 0.00B", "saving 500M/1.00GB"))
    assert "quiet" not in shown.written
    text = "\n".join(shown.lines)
    assert f" checkpoint  {PATH}" in shown.lines
    assert [line for line in shown.lines if "eval_loss" in line] == [
        f"step {step}: eval_loss 1.5" for step in (1, 2, 3)
    ]
    after = text.partition("step 3/4")[2].split("\n", 1)[1]
    assert " ".join(after.split()) == "error: " + " ".join(30 * ["much went wrong"])  # and nothing after it


def test_one_of_a_thing_is_in_the_singular() -> None:
    assert console.pluralize(1, "step") == "1 step" and console.pluralize(1200, "step") == "1,200 steps"
    assert [console.pluralize(count, "sample split") for count in (0, 1)] == ["0 samples split", "1 sample split"]


def test_a_fact_of_several_lines_keeps_them() -> None:
    facts = {"train_file": "2 records\n1 skipped as bad, such as a.jsonl:2", "x": "y"}
    assert console.render_panel("data", facts, 30, "-").split("\n") == [
        "-- data ----------------------",
        " train_file  2 records",
        "             1 skipped as bad,",
        "               such as",
        "               a.jsonl:2",
        " x           y",
        30 * "-",
    ]


def test_without_a_terminal_there_are_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = io.StringIO()
    monkeypatch.setattr(console, "stream", lambda: heard)
    clock = iter([0.0, 5.0, 11.0, 12.0, 50.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(clock))
    console.show_panel("demo: training on 2 ranks", {"layout": "pp2 " + "x" * 200, "data": "2 records\n1 skipped"})
    with console.progress("saving", 2e9, "B") as saving:  # at second 0
        for _ in range(4):
            saving.advance(5e8)
    assert heard.getvalue().splitlines() == [
        "demo: training on 2 ranks",
        "layout: pp2 " + "x" * 200,
        "data: 2 records",
        "  1 skipped",
        "saving: 50% of 2.00GB",
        "saving: 100% of 2.00GB",
    ]


def test_a_phase_that_takes_long_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    came = threading.Event()

    def say(text: str) -> None:
        said.append(text)
        came.set()

    monkeypatch.setattr(console, "say", say)
    monkeypatch.setattr(console, "_SECONDS_BEFORE_PHASE", 0.0)
    with console.phase("starting the engine"):
        assert came.wait(60)
    with console.phase("of another rank", shown=False):
        assert not [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]
    monkeypatch.setattr(console, "_SECONDS_BEFORE_PHASE", 3600.0)
    with pytest.raises(KeyError), console.phase("that fails"):
        (timer,) = (thread for thread in threading.enumerate() if isinstance(thread, threading.Timer))
        raise KeyError
    timer.join(60)
    assert not timer.is_alive() and said == ["starting the engine ..."]


def test_a_replayed_terminal_shows_what_was_written_last() -> None:
    assert replay("one\r\n  0%|\r 50%|#\r\x1b[2Kdone\r\nlast\x1b[A\rg\x1b[1mo") == ["one", "gone", "last"]


@pytest.mark.parametrize("is_main", [True, False])
def test_libraries_write_to_the_log_and_their_warnings_are_said_once_by_the_main_rank(
    is_main: bool, tmp_path: Path
) -> None:
    from training.distributed.process import buffer_library_logs, redirect_output_to_log
    from training.distributed.ranks import Ranks

    person, log = tmp_path / "screen", tmp_path / "logs" / "rank_0.log"
    pid = os.fork()
    if pid == 0:
        import logging
        import warnings

        code = 1
        try:
            os.dup2(os.open(person, os.O_WRONLY | os.O_CREAT), 2)
            sys.__stderr__ = os.fdopen(2, "w")
            ranks = Ranks(0 if is_main else 1, 2, 0, 2)
            buffer_library_logs()
            logging.getLogger("transformers.models").warning("before there was a log")
            redirect_output_to_log(log, ranks)
            for _ in range(2):
                logging.getLogger("DeepSpeed").warning("mind this\nin two lines")
            with warnings.catch_warnings(action="always"):
                warnings.warn("look out", stacklevel=1)
                warnings.warn("will change", FutureWarning, stacklevel=1)
            os.write(2, b"from another language\n")
            print("printed")
            ranks.say("said")
            console.say_last("the end")
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    warned = [
        f"warning ({source}): {text}; more in {log}"
        for source, text in (
            ("transformers", "before there was a log"),
            ("DeepSpeed", "mind this"),
            ("UserWarning", "look out"),
        )
    ]
    assert person.read_text().splitlines() == ([*warned, "said"] if is_main else []) + ["the end"]
    written = log.read_text()
    assert written.count("mind this\nin two lines\n") == 2
    assert all(
        text in written
        for text in ("before there was a log\n", "look out", "will change", "from another language\n", "printed\n")
    )


UNREAD = """
import sys
from pathlib import Path
import console
console.redirect_to_console(Path("log"))
sys.stdin.read()
for number in range(3):
    console.say("nobody reads this")
with console.progress("working", 3, "steps") as bar:
    bar.advance()
console.say_last("nor this")
Path("saved").touch()
"""


def test_a_reader_of_the_screen_that_is_gone_ends_no_run(tmp_path: Path) -> None:
    """As `tee` is in `deepspeed ... | tee log` after Ctrl-C."""
    process = subprocess.Popen(
        [sys.executable, "-c", UNREAD], cwd=tmp_path, stdin=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert process.stdin is not None and process.stderr is not None
    process.stderr.close()
    process.stdin.close()
    assert process.wait(60) == 0 and (tmp_path / "saved").exists()
