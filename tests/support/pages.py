"""Reads the data of the project's pages, and opens them in a browser."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest


def load_page(file: Path) -> dict[str, Any]:
    """Returns the data that a page holds."""
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', file.read_text(), re.DOTALL)
    return json.loads(found)


def open_in_browser(file: Path, profile: Path, width: int, script: str) -> tuple[str, list[str]]:
    """Opens a copy of a page in Chromium without a window, and runs `script` in it. Returns the title that the script
    gave the page, and the lines of the console. Skips the test where there is no Chromium; CHROMIUM names one.

    The page is in a frame, since no window of Chromium is narrower than 500 pixels."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium; CHROMIUM=path names one")
    copy = file.with_name(f"copy-{file.name}")
    page = html.escape(file.read_text().replace("</body>", f"<script>{script}</script></body>"))
    take_title = "document.title = this.contentDocument.title"
    copy.write_text(
        f'<title></title><iframe srcdoc="{page}" style="width: {width}px; height: 900px; border: 0" '
        f'onload="{take_title}"></iframe>'
    )
    done = subprocess.run(
        [chromium, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}",
         "--window-size=1500,900", "--enable-logging=stderr", "--dump-dom", copy.absolute().as_uri()],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    (title,) = re.findall("<title>(.*?)</title>", done.stdout)[:1]
    return title, [line for line in done.stderr.splitlines() if "CONSOLE" in line]
