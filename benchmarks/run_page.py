"""Times how long a browser needs for the page of a long run, next to a page without anything.

    python benchmarks/run_page.py [--steps 100000] [--rounds 5]

A run of so many steps is written, with two stages, evaluations and events, and scripts/report.py makes `report.html` of
it. Headless Chromium (CHROMIUM=path names one) opens it as wide as a screen and as a phone, each time in a new process.
The time is the browser's own, of its entry for the navigation: from its start to the end of the `load` event, by which
the curves are drawn and laid out. The first round fills caches and is not counted.
"""

from __future__ import annotations

import argparse
import html
import json
import math
import os
import random
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

WIDTHS = {"screen": 1400, "phone": 390}
LAY_OUT = "<script>document.body.offsetHeight</script></body>"
EMPTY = "<!doctype html><title></title><body></body>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("error: there is no Chromium; CHROMIUM=path names one")
    with tempfile.TemporaryDirectory(prefix="benchmark-run-page-") as name:
        folder = Path(name)
        run = write_run(folder / "run", arguments.steps)
        subprocess.run([sys.executable, ROOT / "scripts" / "report.py", run], check=True, stdout=subprocess.DEVNULL)
        page = (run / "report.html").read_text()
        print(f"{arguments.steps:,} steps, {len(page) / 1e6:.2f} MB; medians of {arguments.rounds} (lowest to highest)")
        for label, width in WIDTHS.items():
            pages = {"the page": page, "an empty one": EMPTY}
            times: dict[str, list[float]] = {each: [] for each in pages}
            for number in range(arguments.rounds + 1):
                for each, text in pages.items():
                    seconds = load(chromium, folder, text, width)
                    if number:
                        times[each].append(seconds)
            for each, found in times.items():
                low, high = min(found), max(found)
                print(f"{label}, {each}: {statistics.median(found):.3f} s ({low:.3f} to {high:.3f})", flush=True)


def write_run(folder: Path, steps: int) -> Path:
    """Writes the files of a run that its page is made of."""
    folder.mkdir()
    noise = random.Random(0)
    (folder / "run.json").write_text(json.dumps({"config": {"seed": 1}, "plan": {"tokens_per_second": 5.0}}))
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            loss = 2 * math.exp(-step / 30_000) + 0.2 * noise.random()
            record = {"step": step, "loss": loss, "num_tokens": 32_768 * step, "grad_norm": 1 + noise.random()}
            record |= {"learning_rate": 1e-4 * (1 - step / steps), "tokens_per_second": 4.5 + noise.random()}
            file.write(json.dumps({**record, "bubble": 0.1, "peak_memory": [7 << 30, 8 << 30]}) + "\n")
            if step % 1000 == 0:
                file.write(json.dumps({"step": step, "eval_loss": loss}) + "\n")
    with open(folder / "events.jsonl", "w") as file:
        for step in range(1000, steps + 1, 1000):
            file.write(json.dumps({"step": step, "kind": "save", "text": f"global_step{step}", "time": step}) + "\n")
    return folder


def load(chromium: str, folder: Path, page: str, width: int) -> float:
    """Returns the seconds of one load, in a frame, since no window of Chromium is narrower than 500 pixels."""
    take = "this.contentWindow.performance.getEntriesByType('navigation')[0]"
    frame = folder / "frame.html"
    frame.write_text(
        f'<title></title><iframe srcdoc="{html.escape(page.replace("</body>", LAY_OUT))}" style="width: {width}px; '
        f'height: 900px; border: 0" onload="document.title = {take}.loadEventEnd"></iframe>'
    )
    done = subprocess.run(
        [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
         "--window-size=1500,900", "--dump-dom", frame.as_uri()],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    milliseconds = float(re.findall("<title>(.*?)</title>", done.stdout)[0])
    if not milliseconds:
        sys.exit("error: the browser gave no time; the load had not ended")
    return milliseconds / 1000


if __name__ == "__main__":
    main()
