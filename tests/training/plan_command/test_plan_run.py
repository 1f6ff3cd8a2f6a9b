"""The plan as a user meets it: for every config that ships, without weights, and in one line where it cannot be
made."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from support.configs import CONF, build_config, compose_config
from support.launching import run_alone
from support.planned import plan_config
from support.quantized import FP8, write_config
from support.tiny import save_llama, save_pairs, save_records, save_tokenizer
from transformers import PretrainedConfig

from data.storage.rows import count_rows
from errors import UserError
from extension import list_conf_folders
from formatting import render_rows, render_seconds
from models.architecture.lookup import build_layers
from models.layers.nf4 import NF4_BYTES, WORK_BYTES
from models.weights.config_file import parse_config
from training.config.schema import RunConfig, to_typed
from training.inputs.datasets import build_row_plan, load_extended, prepare_file
from training.inputs.estimates import estimate_num_rows, estimate_steps
from training.plan_command.report import render_plan
from training.plan_command.run import (
    check_world_size,
    plan_run,
    resolve_planned,
)
from training.planner.prediction import find_machine
from training.resolution.resolve import resolve_layout
from training.resolution.target import Target

FILES = {file.stem: file for folder in (CONF, *list_conf_folders()) for file in folder.glob("*.yaml")}
PRIMARY = sorted(FILES.keys() - {"base"})
PLANNED = re.compile(r"# python trainer_base_ds_mp\.py -cn (\S+) (plan=true .*)")
EXPERTS_PAGE = CONF.parent / "docs" / "experts.md"
UNREAD = ("model_name_or_path", "train_file", "output_dir")
UNPACKED = ("data.packing=false", "context_parallel_mode=ulysses")
PICTURED = ("llama_7b_pp4", "llama_65b_pp8")  # half a second each; test_timeline_plot.py draws all kinds


def planned_arguments(name: str) -> list[str]:
    """The overrides of the plan that a config's first comment names."""
    comment = (line for line in FILES[name].read_text().splitlines() if line.startswith("#"))
    found = [match for match in map(PLANNED.fullmatch, comment) if match]
    assert len(found) == 1 and found[0][1] == name, (
        f"conf/{name}.yaml: the first comment must name a plan, the GPUs that it fits"
    )
    return shlex.split(found[0][2])


def build(name: str, *overrides: str) -> RunConfig:
    return to_typed(compose_config(name, *overrides), UNREAD)


def with_shipped_size(config: RunConfig) -> RunConfig:
    """The demo starts from weights that `make demo` makes; without them its size stands in conf/model."""
    if not config.model and not Path(config.model_name_or_path).exists():
        config.model = OmegaConf.to_container(OmegaConf.load(CONF / "model" / "llama_tiny.yaml"))
    return config


@pytest.mark.parametrize("name", PRIMARY)
def test_every_shipped_config_fits_the_gpus_that_it_names(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # test_layer_times.py times layers on this machine; here it is enough that the plan comes out
    monkeypatch.setattr("training.plan_command.run.profile_layers", lambda run, machine: (run.costs, machine))
    if name not in PICTURED:
        monkeypatch.setattr("training.plan_command.run.advise", lambda *_: [])  # test_advice.py
        monkeypatch.setattr("training.plan_command.run.save_picture", lambda plan, config: tmp_path / "schedule.png")
    config = with_shipped_size(build(name, *planned_arguments(name), f"output_dir={tmp_path}"))
    report = "\n".join(plan_run(config))
    assert "\nFITS: " in report and "whole run: " in report
    assert len(re.findall(r"^ +\d+ +\d+-\d+ ", report, re.MULTILINE)) == config.num_stages
    assert report.isascii() and (tmp_path / "schedule.png").is_file() == (name in PICTURED)
    check_figures(read_comment(name), report)


def read_comment(name: str) -> str:
    return " ".join(re.findall(r"^# (.*)$", FILES[name].read_text(), re.MULTILINE))


def check_figures(comment: str, report: str) -> None:
    """Compare what a config's comment says of memory, if anything, with what its plan says."""
    used, host = re.search(r"\b(\d+) GiB used", comment), re.search(r"([\d,]+) GiB of (host )?memory", comment)
    if used:
        needed = re.search(r"^FITS: .* needs ([\d.]+) of", report, re.MULTILINE)
        assert needed and abs(int(used[1]) - float(needed[1])) < 0.56  # it has one decimal
    if host:
        assert f"host memory {host[1]} GiB a node" in report
    teacher = re.search(r"the teacher (\d+)", comment)
    if teacher:
        needed = re.search(r"teacher FITS: ([\d.]+) of", report)
        assert needed and abs(int(teacher[1]) - float(needed[1])) < 0.56


@pytest.mark.parametrize("comment", ["(32 GiB used)", "(30 GiB used)", "9 GiB of host memory", "the teacher 8)"])
def test_a_comment_with_other_figures_than_the_plan_is_found(comment: str) -> None:
    report = "teacher FITS: 7.2 of 8\nFITS: stage 0 needs 31.4 of 80.0 GiB\nhost memory 1,009 GiB a node of 4 ranks"
    check_figures("(31 GiB used; the teacher 7), and 1,009 GiB of host memory", report)
    with pytest.raises(AssertionError):
        check_figures(comment, report)


def read_page() -> dict[str, tuple[str, str]]:
    """The configs in the tables of docs/experts.md -> GiB of the fullest GPU, and tokens/s of a GPU."""
    found, columns = {}, (0, 0)
    for line in EXPERTS_PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if "GiB of the fullest GPU" in cells:
            columns = cells.index("GiB of the fullest GPU"), cells.index("tokens/s of a GPU")
        elif named := re.search(r"^\|.*?(?:-cn | `)(\w+)`", line):
            found[named[1]] = cells[columns[0]], cells[columns[1]]
    return {name: figures for name, figures in found.items() if name in PRIMARY}


def test_every_config_in_a_table_of_that_page_is_read() -> None:
    rows = [line for line in EXPERTS_PAGE.read_text().splitlines() if line.startswith("|")]
    assert sorted(read_page()) == sorted({word for row in rows for word in re.findall(r"\w+", row)} & set(PRIMARY))


@pytest.mark.full
@pytest.mark.parametrize("name", read_page())
def test_figures_on_the_page_of_experts_are_those_of_the_plan(name: str) -> None:
    """tokens/s with two digits."""
    plan = plan_config(build(name, *planned_arguments(name)))
    tokens = float(f"{plan.tokens_per_second / plan.layout.world_size:.1e}")
    assert read_page()[name] == (str(round(plan.fullest.memory.peak / 2**30)), f"{tokens:,.0f}")


def test_a_table_wider_than_the_terminal_is_turned() -> None:
    header, rows = ("stage", "memory", "x"), [("0", "10.00", "-"), ("1", "9.00", "-"), ("2", "8.00", "y")]
    assert (
        render_rows(header, rows, 16) == render_rows(header, rows)
        and render_rows(header, rows)[0] == "stage  memory  x"
    )
    assert render_rows(header, rows, 15) == [
        "stage       0", "memory  10.00", "x           -", "",
        "stage      1", "memory  9.00", "x          -", "",
        "stage      2", "memory  8.00", "x          y",
    ]  # fmt: skip


def test_a_balanced_split_moves_layers_to_stages_with_room() -> None:
    """A little less memory than the fullest stage needs: another split is found, the least slow of those that fit, and
    a run on such a GPU takes the same. With far less memory, none fits, and the split is the balanced one again."""
    given = (
        "world_size=8",
        "hardware=a100_80g",
        "micro_batch_size=2",
        "gradient_accumulation_steps=16",
        "activation_checkpoint_interval=0",
    )
    free = plan_config(build("llama_7b_pp4", *given))
    bounds = [stage.chunks[0].first_layer for stage in free.stages]
    missing = 1.5 * 2**30
    tight = build("llama_7b_pp4", *given, f"hardware.memory={(free.fullest.memory.peak - missing) / 0.95 / 2**30}")
    plan = plan_config(tight)
    assert free.fits and plan.fits and plan.imbalance > free.imbalance
    assert [stage.chunks[0].first_layer for stage in plan.stages] != bounds

    model = resolve_planned(tight)
    target = Target(8, True, find_machine(tight.hardware, "NVIDIA A100-SXM4-80GB", tight, local_size=8))
    assert resolve_layout(model, tight, target).bounds[:-1] == [stage.chunks[0].first_layer for stage in plan.stages]
    assert find_machine(tight.hardware, "Some other GPU", tight, local_size=8) is None

    hopeless = plan_config(build("llama_7b_pp4", *given, "hardware.memory=20"))
    assert not hopeless.fits and [stage.chunks[0].first_layer for stage in hopeless.stages] == bounds


def test_the_command_itself(tmp_path: Path) -> None:
    """No launcher, no weights, no training data; the picture is all that it leaves."""
    ended = run_alone(["-cn", "llama_65b_pp8", *planned_arguments("llama_65b_pp8")], tmp_path)
    assert ended.code == 0 and "\nFITS: stage" in ended.output, ended.output
    assert "accelerator" not in ended.output  # of DeepSpeed, when it is imported
    left = [str(file.relative_to(tmp_path)) for file in tmp_path.rglob("*") if file.is_file()]
    assert sorted(left) == ["launch.log", "outputs/llama_65b_pp8/schedule.png"]


def test_the_shape_comes_from_conf_and_parameters_from_the_real_layers() -> None:
    """Llama 7B: 6,738,415,616 parameters, as published."""
    plan = plan_config(build("llama_7b_pp4", "plan=true", "world_size=4"))
    assert sum(stage.num_parameters for stage in plan.stages) == 6_738_415_616


def test_too_much_is_said_by_how_much_and_on_which_stage(tmp_path: Path) -> None:
    report = "\n".join(
        plan_run(build("llama_65b_pp8", "plan=true", "world_size=8", "hardware=a100_40g", f"output_dir={tmp_path}"))
    )
    assert re.search(
        r"DOES NOT FIT: stage \d needs [\d.]+ of 37\.4 GiB, in the backward pass, [\d.]+ GiB too much; "
        r"most of it is gradients",
        report,
    )
    assert "change: more num_stages" in report


def test_a_host_that_is_too_small(tmp_path: Path) -> None:
    report = "\n".join(
        plan_run(
            build(
                "llama_65b_pp8",
                "plan=true",
                "world_size=8",
                "hardware=h200",
                "hardware.host_memory=500",
                f"output_dir={tmp_path}",
            )
        )
    )
    assert re.search(r"DOES NOT FIT the host: a node needs 1,\d+ GiB, \d+ too much; more nodes share it", report)


def test_weights_that_are_there_decide(tmp_path: Path) -> None:
    save_llama(tmp_path / "hf", num_hidden_layers=3)
    arguments = ("plan=true", "world_size=2", f"model_name_or_path={tmp_path}/hf", "precision=fp32")
    assert plan_config(build("llama_tiny_pp2", *arguments)).stages[-1].chunks[-1].last_layer == 3 + 2
    with pytest.raises(UserError, match=r"model.vocab_size=32000, but .*config.json says 320"):
        list(plan_run(build("llama_7b_pp4", "plan=true", "world_size=4", f"model_name_or_path={tmp_path}/hf")))


def test_quantized_weights_are_planned_as_what_they_become(tmp_path: Path) -> None:
    for name in ("quantized", "whole"):
        save_llama(tmp_path / name)
    write_config(tmp_path / "quantized", quantization_config=FP8)
    arguments = ("plan=true", "world_size=2")
    plans = [
        plan_config(build("llama_tiny_pp2", *arguments, f"model_name_or_path={tmp_path / name}"))
        for name in ("quantized", "whole")
    ]
    assert plans[0].stages == plans[1].stages and plans[0].costs == plans[1].costs


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("world_size=null",), "plan=true needs world_size=N, the number of GPUs to plan for"),
        (("world_size=0",), "world_size=0: 1 or more, or a list of such numbers"),
        (("world_size=[4,0]",), "world_size=[4, 0]: 1 or more, or a list of such numbers"),
        (("world_size=[4,8]",), "world_size=[4, 8]: this plan is for one number of GPUs; give one"),
        (("world_size=6",), "world_size=6 is not a multiple of num_stages=4; the nearest is 4 or 8"),
        (("world_size=2",), "world_size=2 is not a multiple of num_stages=4; the nearest is 4"),
        (("world_size=4", "plan=maybe"), "plan=maybe: one of false, true, search"),
        (
            ("world_size=4", "model=from_checkpoint"),
            "model_name_or_path=checkpoints/llama_7b is not there, and model=from_checkpoint states no",
        ),
        (("world_size=4", "partition_method=[1,2,3,4]"), "gives 10 layers to 4 stages; it must give 35"),
    ],
)
def test_a_plan_that_cannot_be_made(overrides: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError) as caught:
        list(plan_run(build("llama_7b_pp4", "plan=true", *overrides)))
    assert message in str(caught.value)


def test_an_unknown_machine(tmp_path: Path) -> None:
    ended = run_alone(["-cn", "llama_7b_pp4", "plan=true", "world_size=4", "hardware=a100"], tmp_path)
    assert ended.code == 1 and ended.errors() == [
        "error: hardware=a100: there is no conf/hardware/a100.yaml; "
        "did you mean a100_40g or a100_80g? there are a100_40g, a100_80g, b200, b300, gb200, gb300, h100, h200, "
        "here, l40s, mi300x, rtx4090, rtx5090, rtx_pro_6000, v100_16g, v100_32g"
    ]


def test_steps_of_the_whole_run(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"prompt": "a"}\n\n' * 130)
    config = build("llama_7b_pp4", f"train_file={file}", "num_train_epochs=3")
    architecture = resolve_planned(build("llama_7b_pp4", "plan=true", "world_size=4")).architecture
    assert estimate_steps(config, 64, architecture) == (6, "")
    assert estimate_steps(build("llama_7b_pp4", "max_steps=5"), 64, architecture) == (5, "")
    assert estimate_steps(build("llama_7b_pp4"), 64, architecture) == (None, "")
    packed = build("llama_7b_pp4", f"train_file={file}", "data.packing=true")
    assert estimate_steps(packed, 64, architecture)[0] is None  # there is no tokenizer, and rows depend on tokens


@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        ((), 30),
        (("data.max_samples=60",), 15),
        (("data.eval_fraction=0.5",), 15),
        (("data.eval_samples=40",), 20),
        (("num_train_epochs=2",), 60),
        (("max_steps=7",), 7),
        (("stop_after_steps=10",), 10),
        (("stop_after_steps=100",), 30),
        (("skip_data_intervals=[[3,6],[5,8],[29,40]]",), 30 - 6 - 2),
        (("stop_after_steps=10", "skip_data_intervals=[[3,6]]", "max_steps=100"), 6),
    ],
    ids=str,
)
def test_the_whole_run_is_what_the_run_trains(
    keys: tuple[str, ...], steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a tokenizer: a record is a row."""
    monkeypatch.setattr("training.plan_command.run.save_picture", lambda plan, config: tmp_path / "schedule.png")
    (tmp_path / "train.jsonl").write_text("{}\n" * 120)
    given = ("model=llama_tiny", "plan=true", "world_size=1", "micro_batch_size=1", "global_batch_size=4")
    given += ("hardware=h100", "hardware.price_per_hour=3", "max_seq_length=64", "learning_rate=1e-5", "warmup_ratio=0")
    report = "\n".join(
        plan_run(build("base", *given, f"train_file={tmp_path}/train.jsonl", f"output_dir={tmp_path}/out", *keys))
    )
    found = re.search(
        r"^whole run: (\d+) steps, at most ([\d.]+)K tokens, .*, [\d.]+ at 3 per GPU", report, re.MULTILINE
    )
    assert found is not None, report
    assert int(found[1]) == steps and float(found[2]) * 1000 == pytest.approx(steps * 4 * 64, rel=0.01)
    assert ("steps: estimated from records of train_file" in report) == ("eval" in str(keys))


def test_too_few_rows_for_a_step_are_reported_as_by_the_run(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n" * 3)
    config = build("llama_7b_pp4", f"train_file={tmp_path}/train.jsonl")
    steps, note = estimate_steps(config, 64, PretrainedConfig())
    assert steps is None
    assert note.startswith("train_file holds fewer samples (3) than one global batch (global_batch_size=64); lower ")


@pytest.mark.parametrize("name", ["llama_8b_dpo_pp4", "llama_8b_distill_pp4", "llama_7b_pp4"])
def test_passes_before_training_are_in_time_and_price(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass over all rows once, whatever the steps, and over those of evaluation files."""
    monkeypatch.setattr("training.plan_command.run.save_picture", lambda plan, config: tmp_path / "schedule.png")
    for file, count in (("train", 12800), ("eval", 1280)):
        (tmp_path / f"{file}.jsonl").write_text("{}\n" * count)
    seconds, prices = [], []
    for keys in (("max_steps=100",), ("max_steps=200",), ("max_steps=200", f"eval_file={tmp_path}/eval.jsonl")):
        config = build(
            name, *planned_arguments(name), f"train_file={tmp_path}/train.jsonl", "hardware.price_per_hour=1", *keys
        )
        *_, report, _ = plan_run(config)
        (found,) = [line for line in report.splitlines() if line.startswith("whole run: ")]
        named = re.search(r"\((.*) for the (?:reference's scores|teacher's pass) before training\)", found)
        assert (named is None) == (name == "llama_7b_pp4"), found
        seconds.append(parse_seconds(named[1]) if named else 0)
        prices.append(float(re.search(r"([\d.]+) at 1 per GPU", found)[1]))
        step = parse_seconds(re.search(r"^step (.*) = pipeline", report, re.MULTILINE)[1])
        whole = parse_seconds(re.search(r"tokens, ([^(,]*)", found)[1])
        assert whole == pytest.approx(config.max_steps * step + seconds[-1], rel=0.01)
        assert prices[-1] == pytest.approx(whole / 3600 * 4, rel=0.01)
    assert seconds[0] == seconds[1] and seconds[2] == pytest.approx(1.1 * seconds[0], rel=0.01)
    assert prices[0] < prices[1]


def parse_seconds(text: str) -> float:
    units = {"ms": 0.001, "s": 1, "min": 60, "h": 3600}
    words = text.split()
    return sum(float(number) * units[unit] for number, unit in zip(words[::2], words[1::2], strict=True))


@pytest.mark.parametrize(
    "keys",
    [
        ("data.packing=true",),
        ("data.packing=true", "data.max_samples=120"),
        ("data.eval_samples=40",),
        ("data.length_policy=split", "max_seq_length=24"),
        ("data=preference", "data.packing=true", "max_seq_length=512"),
    ],
    ids=lambda keys: keys[0] + keys[-1][-3:],
)
def test_steps_of_the_plan_are_those_of_the_run(tmp_path: Path, keys: tuple[str, ...]) -> None:
    save_llama(tmp_path / "model")
    tokenizer = save_tokenizer(tmp_path / "model")
    save = save_pairs if "data=preference" in keys else save_records
    file = save(tmp_path / "train.jsonl", 300)
    size = ("world_size=1", "plan=true", "max_seq_length=256", "micro_batch_size=1", "global_batch_size=4")
    config = build(
        "base", f"model_name_or_path={tmp_path}/model", f"train_file={file}", f"data.cache_dir={tmp_path}/cache",
        *size, *keys,
    )  # fmt: skip
    architecture = resolve_planned(config).architecture
    estimated = estimate_steps(config, 4, architecture)
    rows = count_rows(prepare_file(config, "train_file", tokenizer, None), build_row_plan(config, "train_file"))
    assert estimated[0] == rows // 4 != 300 // 4
    assert estimate_steps(config, 4, architecture) == (rows // 4, "")  # of the cached tokens


def test_steps_of_a_large_file_are_estimated_from_its_first_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data.storage.disk.ROW_SAMPLE_RECORDS", 100)
    save_llama(tmp_path / "model")
    save_tokenizer(tmp_path / "model")
    file = save_records(tmp_path / "train.jsonl", 1000)
    keys = ("data.packing=true", "max_seq_length=256", "max_steps=null", f"data.cache_dir={tmp_path}/cache")
    config = build("base", f"model_name_or_path={tmp_path}/model", f"train_file={file}", "hardware=h100", *keys)
    architecture = resolve_planned(replace(config, plan=True, world_size=1)).architecture
    steps, note = estimate_steps(config, 1, architecture)
    tokenizer = load_extended(config, f"{tmp_path}/model")
    rows = count_rows(prepare_file(config, "train_file", tokenizer, None), build_row_plan(config, "train_file"))
    assert steps == pytest.approx(rows, rel=0.05) and note == "steps: estimated from records of train_file"


def test_a_length_beyond_the_positions_is_warned_of(tmp_path: Path) -> None:
    save_llama(tmp_path / "model", max_position_embeddings=64)
    size = ("world_size=1", "micro_batch_size=1", "global_batch_size=4", "hardware=h100", f"output_dir={tmp_path}/out")
    texts = [
        list(
            plan_run(
                build("base", f"model_name_or_path={tmp_path}/model", f"max_seq_length={length}", *size, "plan=true")
            )
        )
        for length in (64, 65)
    ]
    assert not any(text.startswith("warning") for text in texts[0])
    assert texts[1][0] == (
        "warning: max_seq_length=65 is more than the 64 positions that the model is made for (max_position_embeddings)"
    )


def test_projections_in_4_bits_take_4_bits(tmp_path: Path) -> None:
    """70B on two GPUs of 48 GB: their weights are a quarter and what the embeddings and norms take."""
    keys = ("model=llama_70b", "max_seq_length=512", "micro_batch_size=1", "global_batch_size=16", "num_stages=2")
    keys += ("world_size=2", "hardware=l40s", "plan=true", "adapter=lora")
    whole, quantized = (
        plan_config(build("base", *keys, f"adapter.load_in_4bit={value}")) for value in ("false", "true")
    )
    assert not whole.fits and quantized.fits
    projections = 80 * (2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    before, after = (sum(stage.memory.weights for stage in plan.stages) for plan in (whole, quantized))
    assert before - after == pytest.approx((2 - 1 / 2 - 1 / 64) * projections, rel=0.001)
    assert quantized.step_seconds > whole.step_seconds  # each product dequantizes its weight


def test_experts_in_4_bits_take_4_bits() -> None:
    """Mixtral 8x7B on one GPU of 80 GB, with adapters on its attention alone."""
    keys = ("model=mixtral_8x7b", "max_seq_length=512", "micro_batch_size=1", "global_batch_size=16", "num_stages=1")
    keys += ("world_size=1", "hardware=h100", "plan=true", "adapter=lora", "adapter.target_parameters=[]")
    whole, quantized = (
        plan_config(build("base", *keys, f"adapter.load_in_4bit={value}")) for value in ("false", "true")
    )
    assert not whole.fits and quantized.fits
    numbers = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 8 * 3 * 4096 * 14336)
    before, after = (plan.stages[0].memory for plan in (whole, quantized))
    assert before.weights - after.weights == pytest.approx((2 - NF4_BYTES) * numbers, rel=0.001)
    two_experts = 2 * 2 * 4096 * 14336  # of 2^28 numbers at most
    assert after.buffers - before.buffers == pytest.approx((2 + WORK_BYTES) * two_experts)
    assert quantized.step_seconds > whole.step_seconds


@pytest.mark.parametrize(("adapter", "share"), [("none", 0.19), ("lora", 0.27)])
def test_the_share_of_recomputation(adapter: str, share: float) -> None:
    """Recomputation is one of four passes as long as a forward pass, but for the last product of each layer, a quarter
    of them. Frozen weights have no gradient, so it is then one of three, apart from the head, which is not recomputed,
    and the adapters."""
    keys = ("model=llama_70b", "max_seq_length=2048", "micro_batch_size=1", "global_batch_size=64", "num_stages=8")
    keys += ("world_size=8", "hardware=b300", "plan=true", "activation_checkpoint_interval=1")
    config = build("base", *keys, f"adapter={adapter}", "schedule=zero_bubble", "gradient_reduce_dtype=bf16")
    report = render_plan(plan_config(config), None)
    found = re.search(r"^what limits speed: recomputation takes (\d+)% of the work", report, re.MULTILINE)
    assert found is not None, report
    assert int(found[1]) / 100 == pytest.approx(share, abs=0.03)


def test_a_search_takes_any_number_of_ranks() -> None:
    check_world_size(build("llama_7b_pp4", "plan=search", "world_size=6"))


def test_every_shipped_size_can_be_counted() -> None:
    """Those of shipped runs are counted above."""
    planned = re.findall(r"override model: (\w+)", "".join(FILES[name].read_text() for name in PRIMARY))
    assert len(planned) > 20
    for file in sorted((CONF / "model").glob("*.yaml")):
        if file.stem not in planned and (fields := OmegaConf.to_container(OmegaConf.load(file))):
            assert build_layers(parse_config(fields, file))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0125, "12.5 ms"), (119.9, "119.9 s"), (145.2, "2 min 25 s"), (3599, "59 min 59 s"), (9000, "2 h 30 min")],
)
def test_a_time_is_rendered_in_units_of_its_size(seconds: float, text: str) -> None:
    assert render_seconds(seconds) == text


def test_packed_rows_have_a_mask_on_gpus_without_their_kernel(tmp_path: Path) -> None:
    save_llama(tmp_path / "model", head_dim=16)
    size = ("world_size=1", "max_seq_length=256", "micro_batch_size=1", "global_batch_size=4", "plan=true")
    size += (f"model_name_or_path={tmp_path}/model", "precision=fp16", "activation_checkpoint_interval=0")
    for hardware, masks in (("h100", False), ("v100_32g", True), ("here", True)):
        packed, plain = (
            resolve_planned(build("base", f"hardware={hardware}", f"data.packing={packs}", *size)).architecture
            for packs in ("true", "false")
        )
        assert packed._attn_implementation == plain._attn_implementation == ("sdpa" if masks else "varlen")
        if hardware != "here":
            peaks = [
                plan_config(build("base", f"hardware={hardware}", f"data.packing={packs}", *size)).fullest.memory.peak
                for packs in ("true", "false")
            ]
            assert (peaks[0] > peaks[1]) == masks


def test_attention_that_a_gpu_could_do_faster_is_what_limits_speed() -> None:
    found = {}
    for hardware, keys in (("h100", ()), ("h100", ("flash_kernels=fa3",)), ("a100_80g", ()), ("h100", UNPACKED)):
        config = build("llama_8b_128k_cp8", "plan=true", "world_size=8", f"hardware={hardware}", *keys)
        report = render_plan(plan_config(config), None)
        found[hardware, keys] = re.search(r"^what limits speed: (\S+)", report, re.MULTILINE)[1]
    assert found == {
        ("h100", ()): "FlashAttention-2's",
        ("h100", ("flash_kernels=fa3",)): "recomputation",
        ("a100_80g", ()): "recomputation",
        ("h100", UNPACKED): "recomputation",
    }


def test_records_are_counted_in_all_files_of_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, count in (("a", 2), ("b", 3)):
        (tmp_path / f"{name}.jsonl").write_text("{}\n" * count)
    assert count_rows_of("train_file='~/a.jsonl'") == 2
    assert count_rows_of(f"train_file={tmp_path}/*.jsonl") == 5
    assert count_rows_of(f"train_file=[{tmp_path}/a.jsonl,{tmp_path}/b.jsonl]") == 5
    assert count_rows_of(f"train_file=[{tmp_path}/a.jsonl,{tmp_path}/b.jsonl]", "data.max_samples=2") == 4
    assert count_rows_of(f"train_file={tmp_path}/missing.jsonl") is None


def count_rows_of(*keys: str) -> int | None:
    rows = estimate_num_rows(build_config(*keys), PretrainedConfig())
    return None if rows is None else rows.num_rows
