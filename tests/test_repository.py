"""Files of the repository that the forge and other tools read: citation, issue forms, version."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
FORMS = sorted(file for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if file.stem != "config")


def read_version() -> str:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_the_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation.keys() >= {"cff-version", "message", "title", "authors"}  # those that the format needs
    assert citation["version"] == read_version() and citation["license"] == "MIT"
    heading = rf"^## {re.escape(read_version())} \({citation['date-released']}\)$"
    assert re.search(heading, (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("file", FORMS, ids=lambda file: file.stem)
def test_an_issue_form_is_one(file: Path) -> None:
    form = yaml.safe_load(file.read_text())
    assert form.keys() == {"name", "description", "labels", "body"}
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert {field["type"] for field in fields} <= {"input", "textarea", "dropdown", "checkboxes"}
    assert len({field["id"] for field in fields}) == len(fields)
    assert all(field["attributes"]["label"] for field in fields)


def test_scripts_and_pages_that_the_forms_name_are_there() -> None:
    texts = [file.read_text() for file in [*FORMS, ROOT / "SECURITY.md", ROOT / ".github/ISSUE_TEMPLATE/config.yml"]]
    named = {name for text in texts for name in re.findall(r"\b(?:scripts|docs)/[\w/]+\.(?:py|md)", text)}
    assert named and all((ROOT / name).is_file() for name in named)


def test_jobs_have_limits_and_what_they_run_is_there() -> None:
    flow = yaml.safe_load((ROOT / ".github/workflows/ci.yaml").read_text())
    assert flow["permissions"] == {"contents": "read"} and "concurrency" in flow
    words = " ".join(step.get("run", "") for job in flow["jobs"].values() for step in job["steps"])
    words = words.replace("${{ matrix.half }}", " make ".join(flow["jobs"]["long"]["strategy"]["matrix"]["half"]))
    targets = set(re.findall(r"\bmake ([\w-]+)", words))
    makefile = (ROOT / "Makefile").read_text()
    assert targets >= {"check", "test", "test-full-parity", "test-full-rest"}
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)
    assert all(job["timeout-minutes"] <= 360 for job in flow["jobs"].values())  # a longer one is ended all the same
    oldest = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    assert flow["jobs"]["test"]["strategy"]["matrix"]["python"][0] == oldest
