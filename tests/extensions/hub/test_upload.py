"""The model of a run on the hub: what arrives there, with which model card, and what becomes of a broken upload."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard, ModelCardData, constants
from support.configs import build_config, compose_config
from support.hub_server import TOKEN, Hub, serve_hub

from console import listen_to_progress
from errors import UserError
from extensions.hub import upload
from extensions.hub.keys import HubConfig
from extensions.hub.model_card import find_base, find_license, render_card
from extensions.hub.upload import Repository, Uploader
from training.checkpoint.run_folder import RunFolder
from training.distributed.ranks import SINGLE_PROCESS
from training.observability.loggers import IsolatedReporter
from training.observability.metrics import Reporter
from training.observability.run_page import read_history
from training.summary import RunEnd

ROOT = Path(__file__).resolve().parents[3]
FACTS: dict[str, Any] = {
    "config": {
        "model_name_or_path": "meta/base-8b@main", "train_file": ["hf:org/chats?split=train", "mine.jsonl"],
        "task": "sft", "max_seq_length": 4096, "learning_rate": 1e-5, "lr_scheduler_type": "cosine", "seed": 7,
        "optimizer": {"name": "adamw"}, "adapter": {"name": "none"}, "num_stages": 2, "tensor_parallel_size": 2,
        "context_parallel_size": 1, "zero_stage": 1, "precision": "bf16", "init": "pretrained",
    },
    "environment": {
        "command": "trainer_base_ds_mp.py -cn mine 'train_file=[hf:org/chats?split=train,mine.jsonl]'",
        "hosts": {"a": 4, "b": 4}, "device": "NVIDIA H100", "python": "3.11.7", "packages": {"torch": "2.13.0"},
        "git": "abc123",
    },
    "data": {
        "train_file": [{"name": "mine.jsonl", "samples": 1200, "tokens": 34000, "targets": 5000}],
        "held_out": [{"name": "mine.jsonl", "samples": 12, "tokens": 340, "targets": 50}],
    },
}  # fmt: skip


@pytest.fixture
def run_folder(tmp_path: Path) -> RunFolder:
    """A finished run with an export."""
    folder = RunFolder(tmp_path / "out")
    folder.export.mkdir(parents=True)
    folder.facts.write_text(json.dumps(FACTS))
    lines: list[dict[str, Any]] = [
        {"step": step, "loss": 3.0 - step / 2, "num_tokens": 1000 * step} for step in (1, 2, 3)
    ]
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"step": 3, "eval_loss": 1.75}]))
    folder.completed.write_text(json.dumps({"step": 3, "ended_by": "the last step"}))
    (folder.export / "config.json").write_text("{}")
    (folder.export / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Stands for HF_ENDPOINT, HF_TOKEN and HF_HUB_DISABLE_XET, which `huggingface_hub` reads when it is imported."""
    with serve_hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


def read_header(text: str) -> dict[str, Any]:
    return yaml.safe_load(text.split("---\n")[1])


@pytest.mark.parametrize(
    ("config", "listed"),
    [
        ({"task": "reward", "data": {"name": "preference"}}, ("transformers", "text-classification")),
        ({"task": None, "data": {"name": "embedding"}}, ("sentence-transformers", "sentence-similarity")),
        ({"task": None, "data": {"name": "rerank"}}, ("transformers", "text-ranking")),
    ],
)
def test_the_model_card_lists_a_model_by_its_task(
    run_folder: RunFolder, config: dict[str, Any], listed: tuple[str, str]
) -> None:
    run_folder.facts.write_text(json.dumps({**FACTS, "config": FACTS["config"] | config}))
    header = read_header(render_card(run_folder, run_folder.export, read_history(run_folder), "me/mine", None))
    assert (header["library_name"], header["pipeline_tag"]) == listed


def test_the_model_card_says_what_the_files_of_the_run_say(run_folder: RunFolder) -> None:
    text = render_card(run_folder, run_folder.export, read_history(run_folder), "me/mine", "llama3")
    assert read_header(text) == {
        "base_model": "meta/base-8b", "base_model_relation": "finetune", "license": "llama3",
        "library_name": "transformers", "pipeline_tag": "text-generation", "datasets": ["org/chats"],
        "tags": ["llm-pipeline", "deepspeed"],
        "model-index": [
            {
                "name": "mine",
                "results": [
                    {
                        "task": {"type": "text-generation"},
                        "dataset": {"name": "held out of mine.jsonl", "type": "held out of mine.jsonl"},
                        "metrics": [{"type": "loss", "value": 1.75, "name": "eval_loss"}],
                    }
                ],
            }
        ],
    }  # fmt: skip
    for line in (
        "| base model | `meta/base-8b` |", "| licence of the base | llama3 |", "| steps | 3, 3,000 tokens |",
        "| layout | 2 stages, 2 replicas, tensor_parallel 2; ZeRO stage 1, bf16 |",
        "| hardware | 8 x NVIDIA H100 on 2 hosts |",
        "| versions | Python 3.11.7, torch 2.13.0; llm-pipeline abc123 |",
        "| `train_file` | `mine.jsonl` | 1,200 | 34,000 | 5,000 |",
        "| `loss` | 2.5000 | 1.5000 | 3 |", "| `eval_loss` | 1.7500 | 1.7500 | 3 |",
        f"```bash\n{FACTS['environment']['command']}\n```",
    ):  # fmt: skip
        assert line in text, line


def test_the_hub_lists_the_evaluation_of_the_exported_step(run_folder: RunFolder) -> None:
    """The best one where that is exported; of each file by itself, and of all; none before the run has ended."""
    lines: list[dict[str, Any]] = [
        {"step": 2, "eval_loss": 1.5, "eval_math_loss": 1.0, "eval_math_easy_f1": 0.5, "eval_tokens": 9},
        {"step": 3, "eval_loss": 2.0, "eval_math_loss": 2.0, "eval_math_easy_f1": 0.1},
    ]
    run_folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = {"eval_file.math": "hf:org/math?split=test", "eval_file.math_easy": "easy.jsonl"}
    data = {key: [{"name": name, "samples": 1, "tokens": 1, "targets": 1}] for key, name in files.items()}
    run_folder.facts.write_text(json.dumps({**FACTS, "data": data}))
    run_folder.completed.write_text(json.dumps({"step": 3, "best_step": 2, "best_metric": 1.5}))
    (run_folder.export / "adapter_config.json").write_text("{}")

    def read_listed() -> ModelCardData:
        text = render_card(run_folder, run_folder.export, read_history(run_folder), "me/mine", None)
        return ModelCard(text).data

    listed = read_listed()
    assert (listed.model_name, listed.base_model_relation) == ("mine", "adapter")
    assert {(each.dataset_type, each.metric_type, each.metric_value) for each in listed.eval_results} == {
        ("hf:org/math?split=test, easy.jsonl", "loss", 1.5), ("org/math", "loss", 1.0), ("easy.jsonl", "f1", 0.5),
    }  # fmt: skip
    run_folder.completed.unlink()
    assert not read_listed().eval_results


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("org/model@main", "org/model"),
        ("org/model", "org/model"),
        ("/data/models/llama@v2", "/data/models/llama@v2"),
        ("../llama@v2/hf", "../llama@v2/hf"),
    ],
)
def test_the_base_of_a_run_is_a_repository_or_a_path(run_folder: RunFolder, name: str, base: str) -> None:
    run_folder.facts.write_text(json.dumps({"config": {"model_name_or_path": name}}))
    assert find_base(run_folder) == base


@pytest.mark.parametrize("text", ["---\nlicense: [a\n---\n", "---\n\x01\n---\n", "no front matter"])
def test_a_model_card_that_cannot_be_read_states_no_licence(tmp_path: Path, text: str) -> None:
    (tmp_path / "README.md").write_text(text)
    assert find_license(tmp_path) is None


def test_secrets_of_an_earlier_version_are_not_in_the_model_card(run_folder: RunFolder) -> None:
    """1.1 wrote them into run.json."""
    trackers = {"mine": {"_target_": "m.T", "api_key": "planted"}}
    environment = FACTS["environment"] | {"command": "deepspeed trainer.py '+logger.trackers.mine={api_key: planted}'"}
    config = FACTS["config"] | {"logger": {"trackers": trackers}, "train_file": "https://me:planted@host/a.jsonl"}
    run_folder.facts.write_text(json.dumps(FACTS | {"config": config, "environment": environment, "data": {}}))
    text = render_card(run_folder, run_folder.export, read_history(run_folder), "me/mine", None)
    assert "planted" not in text and "api_key: ***" in text and "https://***@host" in text


def test_the_model_card_of_an_adapter_on_a_local_model_names_neither_a_repository_nor_a_licence(
    run_folder: RunFolder, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    base.mkdir()
    adapter = {"name": "lora", "r": 8, "lora_alpha": 16, "target_modules": "all-linear"}
    config = FACTS["config"] | {"model_name_or_path": str(base), "adapter": adapter}
    config |= {"num_stages": 4, "metric_for_best_model": "eval_loss"}
    facts = {"mine": {"summary": "as an extension says", "figure": 1}, "other": {"figure": 2}}
    run_folder.facts.write_text(json.dumps(FACTS | {"config": config, "data": {}, "facts": facts}))
    run_folder.completed.write_text(json.dumps({"step": 3, "best_step": 2, "best_metric": 1.25}))
    (run_folder.export / "adapter_config.json").write_text("{}")
    text = render_card(run_folder, run_folder.export, read_history(run_folder), "me/mine", None)
    header = read_header(text)
    assert header["library_name"] == "peft" and not header.keys() & {"base_model", "license"}
    assert "| exported | step 2, the best by eval_loss (1.2500) |" in text and "| layout | 4 stages, 1 replica," in text
    assert "| mine | as an extension says |\n" in text and "other" not in text
    assert "| adapter | r 8, alpha 16, on all-linear |" in text and "not stated where it was read from" in text
    assert 'Streamed from `["hf:org/chats?split=train", "mine.jsonl"]`' in text


def test_an_upload_that_broke_off_sends_the_rest_and_the_token_is_in_no_file(hub: Hub, run_folder: RunFolder) -> None:
    hub.fields["meta/base-8b"] = {"license": "llama3"}
    repository = Repository("me/mine", private=True)
    hub.num_broken = 1
    with pytest.raises(Exception, match="Error while uploading"):
        repository.upload(run_folder, run_folder.export, "step 3")
    assert hub.repos["me/mine"] == {} and len(hub.puts) == 1
    assert repository.upload(run_folder, run_folder.export, "step 3") == f"{hub.url}/me/mine"
    assert len(hub.puts) == 2 == len(set(hub.puts)), "what had arrived is not sent again"
    held = hub.repos["me/mine"]
    assert held == {file.name: file.read_bytes() for file in run_folder.export.iterdir()}
    assert held.keys() == {"README.md", "loss.png", "config.json", "model.safetensors"}
    assert held["loss.png"].startswith(b"\x89PNG") and read_header(held["README.md"].decode())["license"] == "llama3"
    assert hub.created == [{"name": "mine", "organization": "me", "visibility": "private"}]
    assert hub.commits == ["step 3"]
    files = [file for file in run_folder.path.rglob("*") if file.is_file()]
    assert not [file for file in files if TOKEN.encode() in file.read_bytes()]


def test_what_would_refuse_the_upload_ends_the_run_before_it_trains(
    hub: Hub, run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Uploader.open(build_config(), run_folder) is None
    with pytest.raises(UserError, match="hub.repo_id=mine: give org/name"):
        Repository("mine", private=True)
    monkeypatch.setenv("HF_TOKEN", "wrong")
    with pytest.raises(UserError, match="hub.repo_id=me/mine: no upload would be possible .*401") as refused:
        Uploader.open(build_config("hub.repo_id=me/mine"), run_folder)
    assert "wrong" not in str(refused.value) and "\n" not in str(refused.value)
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(run_folder.path / "token"))
    with pytest.raises(UserError, match="set HF_TOKEN in the environment .*, or use hf auth login"):
        Repository("me/mine", private=True)
    (run_folder.path / "token").write_text(TOKEN)  # of `hf auth login`
    Repository("me/mine", private=True)


@pytest.mark.parametrize(
    ("name", "token", "role", "said"),
    [
        ("me/mine", "", "write", "set HF_TOKEN in the environment"),
        ("me/mine", TOKEN, "read", "set HF_TOKEN in the environment to a token that may write"),
        ("me/mine", "wrong", "write", "no upload would be possible .*Invalid user token"),
        ("me/mine--2", TOKEN, "write", "give org/name, or your own name"),
    ],
)
def test_a_wrong_name_or_token_is_found_before_the_model_is_looked_for(
    name: str,
    token: str,
    role: str,
    said: str,
    hub: Hub,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """By the start of a run itself: neither its model nor its data exists."""
    from training import run as training_run

    hub.role = role
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setattr(training_run, "read_ranks", lambda: SINGLE_PROCESS)
    monkeypatch.setattr(training_run.process, "buffer_library_logs", lambda: None)
    config = compose_config(
        "base", f"model_name_or_path={tmp_path}/hf", f"train_file={tmp_path}/x.jsonl",
        f"output_dir={tmp_path}/out", f"hub.repo_id={name}",
    )  # fmt: skip
    with pytest.raises(SystemExit):
        training_run.run(config)
    error = capfd.readouterr().err
    assert re.search(f"error: hub.repo_id={name}: {said}", error)
    assert {file.name for file in (tmp_path / "out").iterdir()} == {".lock", "ended.json"}
    assert not hub.created


def test_a_hub_that_does_not_say_whose_a_token_is_ends_no_run(hub: Hub) -> None:
    hub.told = 429
    upload.check_upload("me/mine")


def test_a_failed_upload_is_printed_with_the_way_out_and_the_next_one_is_tried(
    hub: Hub, run_folder: RunFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    uploader = Uploader(Repository("me/mine", private=False), run_folder)
    hub.num_broken = 2
    uploader.start(run_folder.export, "step 2")
    uploader.wait()
    said = capfd.readouterr().err
    assert "hub: step 2 could not be uploaded (" in said and hub.created[0]["visibility"] == "public"
    assert f"python -m extensions.hub {run_folder.path} --repo_id me/mine" in said and TOKEN not in said
    uploader.start(run_folder.export, "step 3")
    uploader.wait()
    assert not uploader.is_busy and f"hub: step 3 is at {hub.url}/me/mine" in capfd.readouterr().err
    assert hub.commits == ["step 3"]


def test_a_rank_that_waits_for_an_upload_is_not_stuck(run_folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """An upload of a large model takes longer than `stuck_minutes`; it ends here once progress was reported twice."""
    monkeypatch.setattr(upload, "_SECONDS_BETWEEN_SIGNS", 0.01)
    signs, ended = list[None](), threading.Event()

    class Slow:
        repo_id = "me/mine"

        def upload(self, *arguments: object) -> str:
            assert ended.wait(60)
            return "somewhere"

    def note() -> None:
        signs.append(None)
        if len(signs) == 2:
            ended.set()

    uploader = Uploader(Slow(), run_folder)  # type: ignore[arg-type]
    uploader.start(run_folder.export, "step 2")
    with listen_to_progress(note):
        uploader.wait()
    assert len(signs) >= 2 and not uploader.is_busy


def test_a_signal_ends_the_wait_for_an_upload_and_the_run_stays_finished(
    run_folder: RunFolder, capfd: pytest.CaptureFixture[str]
) -> None:
    """It says how to upload later, and closes what else is open."""
    from training.run import hand_over

    started, may_end, closed = (threading.Event() for _ in range(3))

    class Slow:
        repo_id = "me/mine"

        def upload(self, *arguments: object) -> str:
            started.set()
            assert may_end.wait(60)
            return "somewhere"

    class Tracker(Reporter):
        def close(self) -> None:
            closed.set()

    def terminate() -> None:
        assert started.wait(60)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=terminate).start()
    loop: Any = SimpleNamespace(reporters=[IsolatedReporter("tracker", Tracker)])
    end = RunEnd(3, 3, "the last step", exported=run_folder.export)
    hand_over(loop, end, [Uploader(Slow(), run_folder)])  # type: ignore[arg-type]
    may_end.set()
    command = f"python -m extensions.hub {run_folder.path} --repo_id me/mine"
    assert f"hub: step 3 is not uploaded, since a signal ends this run, which has finished. Later: {command}" in (
        capfd.readouterr().err
    )
    assert closed.is_set() and not run_folder.ended.exists()


@pytest.mark.full
def test_the_script_uploads_a_finished_run(run_folder: RunFolder) -> None:
    with serve_hub() as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
        command = [sys.executable, "-m", "extensions.hub", run_folder.path, "--repo_id", "me/mine"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0 and done.stdout == f"{run_folder.export} is at {hub.url}/me/mine\n", done.stderr
        assert len(hub.repos["me/mine"]) == 4 and TOKEN not in done.stderr


def test_the_script_says_what_to_do_without_an_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"

    def upload(*words: str) -> str:
        monkeypatch.setattr(sys, "argv", ["upload.py", str(out), "--repo_id", "me/mine", *words])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / "extensions" / "hub" / "__main__.py"), run_name="__main__")
        return str(ended.value)

    assert upload() == f"error: {out}/hf is not there; give the output_dir of a run that has finished"
    (out / "checkpoints").mkdir(parents=True)
    (out / "checkpoints" / "latest").write_text("global_step2")
    command = f"python convert2ckpt.py --to_hf --model_name_or_path {out}/checkpoints --output_dir {out}/hf"
    assert upload().endswith(f"continue it with resume=auto, or export its newest checkpoint: {command}")
    (out / "hf-step2").mkdir()
    assert upload() == f"error: {out}/hf is not there; give --folder, of {out}/hf-step2"
    assert upload("--folder", "x") == f"error: x is not there; give --folder, of {out}/hf-step2"


@pytest.mark.full
def test_a_run_uploads_while_it_trains_and_at_its_end(root: Path, tmp_path: Path) -> None:
    """Its second step as hf/, then the last one, whose weights are those that stay there."""
    out = tmp_path / "out"
    with serve_hub() as hub:
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": TOKEN}
        keys = (
            f"model_name_or_path={root}/tiedFalse", f"train_file={root}/train.jsonl", f"output_dir={out}",
            f"data.cache_dir={tmp_path}/cache", "num_stages=1", "micro_batch_size=2", "global_batch_size=4",
            "max_seq_length=256", "precision=fp32", "learning_rate=1e-2", "max_steps=3", "hub.repo_id=me/mine",
            "hub.every=2",
        )  # fmt: skip
        command = [sys.executable, ROOT / "trainer_base_ds_mp.py", *keys]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stdout + done.stderr
        assert hub.commits == ["step 2", "step 3"] and f"hub: step 3 is at {hub.url}/me/mine" in done.stderr
        held = hub.repos["me/mine"]
    assert held["model.safetensors"] == (out / "hf" / "model.safetensors").read_bytes()
    assert "| steps | 3, " in held["README.md"].decode()
    assert 3 <= len(hub.puts) <= 4, (
        "weights of two steps, and their losses: the same ones where the first upload is late"
    )
    assert TOKEN not in done.stdout + done.stderr
    assert not [file for file in out.rglob("*") if file.is_file() and TOKEN.encode() in file.read_bytes()]


def test_a_model_is_uploaded_while_a_run_continues_only_where_there_is_a_repository() -> None:
    """Each such step is saved too."""
    assert [step for step in range(1, 7) if HubConfig("me/mine", True, every=3).is_due(step)] == [3, 6]
    for hub in (HubConfig(None, True, every=3), HubConfig("me/mine", True, every=None)):
        assert not any(map(hub.is_due, range(1, 7)))
