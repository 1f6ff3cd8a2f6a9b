"""The trainer across two hosts, through launchers that need no ssh. The hosts are network namespaces on this
machine. (A whole run across them: tests/test_launcher.py.)"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.hosts import TwoHosts, two_hosts, why_not
from support.launching import PORT_OF_HOSTS, ROOT, Launch, list_launcher_words, run_alone, run_on_hosts
from support.tiny import save_llama, save_records, save_tokenizer

REASON = why_not()
pytestmark = [pytest.mark.full, pytest.mark.skipif(REASON is not None, reason=str(REASON))]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    with two_hosts(tmp_path) as hosts:
        yield hosts


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and records."""
    root = tmp_path_factory.mktemp("hosts")
    save_llama(root / "hf", num_hidden_layers=2)
    save_tokenizer(root / "hf")
    save_records(root / "train.jsonl", 24)
    return root


def arguments(root: Path, output_dir: Path, *overrides: str) -> list[str]:
    return [
        "-cn",
        "llama_tiny_pp2",
        f"model_name_or_path={root}/hf",
        f"train_file={root}/train.jsonl",
        "eval_file=null",
        f"output_dir={output_dir}",
        f"data.cache_dir={output_dir.parent}/cache",
        "micro_batch_size=2",
        "global_batch_size=8",
        "max_steps=2",
        "logging_steps=1",
        "eval_on_start=false",
        "eval_steps=null",
        *overrides,
    ]


def torchrun(hosts: TwoHosts, slots: int) -> list[str]:
    return [
        "torchrun",
        "--nnodes",
        "2",
        "--node_rank",
        "{rank}",
        "--nproc_per_node",
        str(slots),
        "--master_addr",
        hosts.addresses[0],
        "--master_port",
        PORT_OF_HOSTS,
    ]


def read_losses(output_dir: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (output_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
@pytest.mark.parametrize("slots", [1, 2])
def test_every_launcher_gives_the_losses_of_one_host(
    hosts: TwoHosts, root: Path, tmp_path: Path, launcher: str, slots: int
) -> None:
    words = torchrun(hosts, slots) if launcher == "torchrun" else list_launcher_words(hosts, slots, tmp_path)
    ended = run_on_hosts(hosts, words, arguments(root, tmp_path / "out"), tmp_path)
    assert [(host.code, host.left_alive, host.errors()) for host in ended] == [(0, [], [])] * 2, ended

    alone = run_alone(arguments(root, tmp_path / "alone", "num_stages=1"), tmp_path)
    assert alone.code == 0, alone.output
    assert read_losses(tmp_path / "out") == pytest.approx(read_losses(tmp_path / "alone"), rel=1e-5)


def test_a_cut_cable_ends_both_sides_and_the_run_goes_on(hosts: TwoHosts, root: Path, tmp_path: Path) -> None:
    def cut(launch: Launch) -> None:
        launch.wait_for("step 3/")
        hosts.cut_the_cable()

    out = tmp_path / "out"
    overrides = ("max_steps=100000", "save_steps=1", "stuck_minutes=0.15")
    ended = run_on_hosts(
        hosts, list_launcher_words(hosts, 1, tmp_path), arguments(root, out, *overrides), tmp_path, while_running=cut
    )
    for host, peer in ((0, 1), (1, 0)):
        assert ended[host].code != 0 and ended[host].left_alive == [], ended[host].output
        assert any(f"rank {peer} has not answered for stuck_minutes=0.15" in line for line in ended[host].errors()), (
            ended[host].output
        )

    alone = run_alone(
        arguments(root, out, "max_steps=100000", "num_stages=1", "resume=latest", "stop_after_steps=1"), tmp_path
    )
    assert (alone.code, alone.errors()) == (0, []), alone.output


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_a_signal_to_the_launcher_of_one_host_saves_on_both(
    hosts: TwoHosts, root: Path, tmp_path: Path, launcher: str
) -> None:
    def terminate(launch: Launch) -> None:
        launch.wait_for("step 3/")
        launch.process.terminate()
        launch.wait_until_gone()

    out = tmp_path / "out"
    words = torchrun(hosts, 1) if launcher == "torchrun" else list_launcher_words(hosts, 1, tmp_path)
    given = arguments(root, out, "max_steps=100000", "save_steps=null")
    ended = run_on_hosts(hosts, words, given, tmp_path, while_running=terminate)
    assert [(host.left_alive, host.errors()) for host in ended] == [([], [])] * 2, ended
    step = len(read_losses(out))
    assert f"stopped by SIGTERM at step {step}" in ended[0].output
    assert (out / "checkpoints" / "latest").read_text() == f"global_step{step}"


OUT_OF_MEMORY = "error (rank 1): OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB; the stack trace is"
ENDED_ELSEWHERE = "error: rank 1 has ended; the screen of its host and its log say why"
KILLED = "error: rank 1 has ended without a message: it was killed, or its host ran out of memory"


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
@pytest.mark.parametrize(
    "how, messages", [("raise", (ENDED_ELSEWHERE, OUT_OF_MEMORY)), ("kill", (KILLED, ""))], ids=["raise", "kill"]
)
def test_a_rank_that_ends_is_named_on_both_hosts_and_the_others_end(
    hosts: TwoHosts,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launcher: str,
    how: str,
    messages: tuple[str, str],
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests"))
    words = torchrun(hosts, 1) if launcher == "torchrun" else list_launcher_words(hosts, 1, tmp_path)
    dies = f"callbacks=[{{_target_: support.dying.DieInStep, rank: 1, how: {how}}}]"
    given = arguments(root, tmp_path / "out", "max_steps=100", dies)
    ended = run_on_hosts(hosts, words, given, tmp_path)
    assert [host.left_alive for host in ended] == [[], []] and all(host.code != 0 for host in ended), ended
    for host, message in zip(ended, messages, strict=True):
        assert not message or [line[: len(message)] for line in host.errors()] == [message], host.output
        assert host.seconds_after_error < 60, host.output


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
@pytest.mark.parametrize("failing", [0, 1])
def test_a_mistake_on_one_host_ends_both(
    hosts: TwoHosts, root: Path, tmp_path: Path, launcher: str, failing: int
) -> None:
    """Before they have met: the other host would wait for it there."""
    (tmp_path / "wrong.jsonl").write_text("no JSON\n")
    hosts.mounts[failing][root / "train.jsonl"] = tmp_path / "wrong.jsonl"
    words = torchrun(hosts, 1) if launcher == "torchrun" else list_launcher_words(hosts, 1, tmp_path)
    given = arguments(root, tmp_path / "out", "data.cache_dir=cache")  # of each host its own
    ended = run_on_hosts(hosts, words, given, tmp_path)
    assert all(host.code != 0 for host in ended) and [host.left_alive for host in ended] == [[], []], ended
    (error,), (named,) = ended[failing].errors(), ended[1 - failing].errors()
    mistake = error.removeprefix(f"error (rank {failing}): ")
    assert named == f"error: rank {failing} ({hosts.names[failing]}) has ended: {mistake}"
    assert all(host.seconds_after_error < 60 for host in ended), ended


@pytest.mark.parametrize("what", ["weights", "config", "data", "same"])
def test_hosts_with_different_copies_do_not_train(hosts: TwoHosts, root: Path, tmp_path: Path, what: str) -> None:
    other = tmp_path / "other"
    save_llama(other / "hf", num_hidden_layers=2, seed=1 if what == "weights" else 0)
    save_tokenizer(other / "hf")
    save_records(other / "train.jsonl", 24, seed=1 if what == "data" else 0)
    if what == "config":
        fields = json.loads((other / "hf/config.json").read_text())
        (other / "hf/config.json").write_text(json.dumps(fields | {"rms_norm_eps": 1e-4}))
    hosts.mounts[1][root / "hf"] = other / "hf"
    hosts.mounts[1][root / "train.jsonl"] = other / "train.jsonl"
    given = arguments(root, tmp_path / "out", "data.cache_dir=cache")  # of each host its own
    ended = run_on_hosts(hosts, torchrun(hosts, 1), given, tmp_path)
    if what == "same":
        assert [(host.code, host.errors()) for host in ended] == [(0, [])] * 2, ended
        return
    assert all(host.code != 0 for host in ended) and [host.left_alive for host in ended] == [[], []]
    named = {"weights": "model.safetensors of the model", "config": "config.json of the model",
             "data": "the tokens of train_file"}  # fmt: skip
    # Only the main rank's host says what differs; the other one may notice first that the main rank has ended.
    (error,) = ended[0].errors()
    assert all(line.startswith("error: rank 0 has ended; ") for line in ended[1].errors()), ended[1].output
    assert f"hosts read different copies of {named[what]}: {hosts.names[0]} has " in error
    assert "; no two hosts have in common: " in error and named[what] in error.split("in common: ")[1]
    assert f", {hosts.names[1]} has " in error and "copy the right one to all hosts" in error
    assert not (tmp_path / "out/checkpoints").exists()


def test_two_hosts_tokenize_into_one_cache_without_common_locks(
    hosts: TwoHosts, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the same time, as on Lustre with localflock: both prepare the folder, and the first to finish names it."""
    odd = {"PYTHONPATH": ROOT / "tests/support/odd_disk", "ODD_DISK": "local-locks", "ODD_DISK_LOG": tmp_path / "met"}
    for name, value in odd.items():
        monkeypatch.setenv(name, str(value))
    ended = run_on_hosts(hosts, torchrun(hosts, 1), arguments(root, tmp_path / "out"), tmp_path)
    assert [(host.code, host.errors(), host.left_alive) for host in ended] == [(0, [], [])] * 2, ended
    assert sorted((tmp_path / "met").read_text().split()[::2]) == sorted(hosts.names)
    (folder,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    assert (folder / "summary.json").is_file()
