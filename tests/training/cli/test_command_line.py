"""Mistakes on the command line get messages of this project."""

from __future__ import annotations

import dataclasses
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig
from support.configs import CONF, build_config

from data.encoders.kinds import KINDS
from errors import UserError
from extension import list_conf_folders, load_extensions
from models.adapters.options import UNSUPPORTED
from training.cli.command_line import SHARED_COMMAND, check_command_line, clean_arguments, compose_command, list_given
from training.config.changed_keys import write_config
from training.config.foreign_keys import FOREIGN_CHOICES
from training.config.schema import RunConfig, register_schema

BASE = "defaults: [base, _self_]\n"


def check(line: str) -> None:
    register_schema()
    check_command_line(clean_arguments(["trainer_base_ds_mp.py", *shlex.split(line)])[1:], CONF, "llama_tiny_pp2")


def message_of(line: str) -> str:
    with pytest.raises(UserError) as caught:
        check(line)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_mistakes_are_found_before_torch_is_imported() -> None:
    """The imports of the entry point take a second; torch would add several."""
    code = "import sys, trainer_base_ds_mp; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=CONF.parent, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_version_is_the_projects() -> None:
    command = [sys.executable, "trainer_base_ds_mp.py", "--version"]
    done = subprocess.run(command, cwd=CONF.parent, capture_output=True, text=True, check=True)
    assert f'\nversion = "{done.stdout.strip()}"\n' in (CONF.parent / "pyproject.toml").read_text()


def test_the_keys_of_a_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    line = ["-cn", "base", "data=chat", "+eval_file.a=x", "distill={coef: 0.2, model: {a: 1}}", "logger=[wandb,mlflow]",
            "+model@distill.model=llama_70b", "++adapter.r=4"]  # fmt: skip
    assert list_given(line) == {
        "data", "eval_file.a", "distill", "distill.coef", "distill.model", "distill.model.a", "logger", "adapter.r",
    }  # fmt: skip
    monkeypatch.setenv(SHARED_COMMAND, "true")
    assert list_given(line) == {"data", "logger"}


def test_an_unknown_name_is_refused_when_the_config_is_composed() -> None:
    def refuse(composed: DictConfig) -> None:
        raise UserError(f"schedule={composed.schedule}: seen")

    register_schema()
    with pytest.raises(UserError, match="^schedule=zigzag: seen$"):
        check_command_line(["schedule=zigzag"], CONF, "llama_tiny_pp2", refuse)


def test_the_launchers_argument_is_dropped_and_keys_come_last() -> None:
    argv = [
        "t.py",
        "--local_rank=1",
        "seed=1",
        "-cn",
        "llama_tiny_pp2",
        "--cfg",
        "job",
        "+model.a=2",
        "--local-rank=0",
        "--config-name=x",
    ]
    assert clean_arguments(argv) == [
        "t.py",
        "-cn",
        "llama_tiny_pp2",
        "--cfg",
        "job",
        "--config-name=x",
        "seed=1",
        "+model.a=2",
    ]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "-cn llama_tiny_pp2",
        "--config-name=llama_tiny_pp2.yaml seed=1",
        "num_stages=1 -cn llama_tiny_pp2 seed=2",
        "--cfg job",
        "optimizer=sgd optimizer.eps=1e-6",
        "+deepspeed.comms_logger.enabled=true +model.hidden_size=3",
        "logger=wandb logger.mode=offline",
        "train_file=[a.jsonl,b.jsonl] partition_method=[4,5]",
        "hydra.verbose=true",
    ],
)
def test_a_correct_command_line_passes(line: str) -> None:
    check(line)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("learning_rte=1", "unknown key 'learning_rte'; did you mean 'learning_rate'?"),
        ("data.promt_field=q", "unknown key 'data.promt_field'; did you mean 'data.prompt_field'?"),
        ("promt_field=q", "unknown key 'promt_field'; did you mean 'data.prompt_field'?"),
        ("betas=[0,0]", "unknown key 'betas'; did you mean 'optimizer.betas'?"),
        ("optmizer=sgd", "unknown key 'optmizer'; did you mean 'optimizer'?"),
        ("xyzzy=1", "unknown key 'xyzzy'; conf/base.yaml lists the known ones"),
        ("+xyzzy=1", "unknown key 'xyzzy'; conf/base.yaml lists the known ones"),
        ("++data.xyzzy=1", "unknown key 'data.xyzzy'; known are data.name, "),
        (
            "model.hidden_size=1",
            "unknown key 'model.hidden_size'; to add a key to 'model', write +model.hidden_size=...",
        ),
        ("seed", "'seed' is not of the form key=value"),
        ("~seed", "~seed: keys cannot be removed"),
        ("--lr 3", "--lr is not a valid option"),
    ],
)
def test_an_unknown_key_comes_with_the_nearest_known_one(line: str, message: str) -> None:
    assert message_of(line).startswith(message)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("num_stages=two", "num_stages=two: must be a whole number"),
        ("seed=1.5", "seed=1.5: must be a whole number"),
        ("learning_rate=fast", "learning_rate=fast: must be a number"),
        ("eval_on_start=maybe", "eval_on_start=maybe: must be true or false"),
        ("precision=fp8", "precision=fp8: must be one of fp32, bf16, fp16"),
        ("optimizer.betas=0.9", "optimizer.betas: must be a list, such as [1,2]"),
        ("skip_data_intervals=[[1,2],5]", "skip_data_intervals, entry 2: must be a list, such as [1,2]"),
        ("optimizer.betas=[a]", "optimizer.betas[0]=a: must be a number"),
        ("output_dir=null", "output_dir: must be a value; null is not allowed"),
        (
            "seed=1,2",
            "seed=1,2 is several values; write seed=[1,2] for a list; --multirun starts one run for each value",
        ),
        ("output_dir=a=b", "output_dir=a=b: cannot be read ("),
        ("model=null", "Config group override must be a string or a list. Got NoneType (in: model=null)"),
    ],
)
def test_a_wrong_type_names_the_key_the_value_and_what_it_must_be(line: str, message: str) -> None:
    assert message_of(line).startswith(message)


def test_quotes_as_the_message_shows_them_work() -> None:
    quoted = message_of("'data.prompt_template=Q: {prompt}'").rpartition("shell's: ")[2]
    assert build_config(*shlex.split(quoted)).data.prompt_template == "Q: {prompt}"


def test_a_missing_config_or_option_comes_with_the_existing_ones() -> None:
    configs = [file for folder in (CONF, *list_conf_folders()) for file in folder.glob("*.yaml")]
    others = f"conf/ has {len(configs) - 1} others; one in another folder needs --config-dir FOLDER"
    assert message_of("-cn llama_9b") == (
        f"-cn llama_9b: there is no conf/llama_9b.yaml; did you mean llama_8b_pp1? {others}"
    )
    assert "; did you mean llama_7b_pp4? conf/ has " in message_of("-cn llama7b")
    assert message_of("-cn xyzzy") == f"-cn xyzzy: there is no conf/xyzzy.yaml; {others}"
    assert message_of("--config-dir /nowhere/at/all") == "--config-dir /nowhere/at/all: there is no such folder"
    assert message_of("optimizer=adam") == (
        "optimizer=adam: there is no conf/optimizer/adam.yaml; did you mean adamw or adamw_8bit? there are adamw, "
        "adamw_8bit, custom, lion, sgd"
    )
    for name in UNSUPPORTED:
        assert message_of(f"adapter={name}") == (
            f"adapter={name} is not supported: {UNSUPPORTED[name]}; give adapter=lora"
        )
    added = {key: hint for each in load_extensions() for key, hint in each.hints.items() if "=" in key}
    assert "data=dpo" in added
    for choice, meaning in (FOREIGN_CHOICES | added).items():
        assert message_of(choice).endswith(f"; write {meaning}")
        check(meaning.partition(",")[0])
    assert message_of("model=llama-7b").startswith(
        "model=llama-7b: there is no conf/model/llama-7b.yaml; did you mean llama_7b? there are bloom_7b1, "
    )


def test_all_unknown_keys_are_named_and_no_other() -> None:
    message = message_of("lora_r=8 'data.template_kwargs={a:1}' data.template_kwargs.a=2 foo=1 lr=1e-4 seed=1")
    assert message == (
        "unknown key 'lora_r'; did you mean 'adapter.r'? unknown key 'foo'; conf/base.yaml lists the known ones. "
        "unknown key 'lr'; did you mean 'learning_rate'?"
    )


def test_a_mistake_in_a_user_defined_config(tmp_path: Path) -> None:
    register_schema()
    for file in [*CONF.glob("*/**/*.yaml"), CONF / "base.yaml"]:
        copy = tmp_path / file.relative_to(CONF)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(file.read_text())
    (tmp_path / "mine.yaml").write_text("defaults: [base, _self_]\nlearning_rte: 1\n")
    with pytest.raises(UserError, match="unknown key 'learning_rte'; did you mean 'learning_rate'?"):
        check_command_line(["-cn", "mine"], tmp_path, "mine")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{BASE}output_dir: x\n  seed: 3\n", "{file}, line 3: mapping values are not allowed here; fix the file"),
        (f"{BASE}num_stages: two\n", "num_stages=two: must be a whole number"),
        (f"{BASE}seed: 1\nseed: 2\n", "{file}, line 3: found duplicate key seed; fix the file"),
        (
            "seed: 1\n",
            "-cn mine: it lacks the key 'model' and {others} others; begin the file with 'defaults: [base, _self_]'",
        ),
    ],
    ids=["not YAML", "a wrong type", "a key twice", "without base"],
)
def test_a_config_that_cannot_be_read(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    register_schema()
    with pytest.raises(UserError) as caught:
        check_command_line(["--config-dir", str(tmp_path), "-cn", "mine"], CONF, "base")
    others = len(dataclasses.fields(RunConfig)) - 2
    assert str(caught.value) == message.format(file=file, others=others)


def test_the_config_of_a_run_starts_from_base(tmp_path: Path) -> None:
    """It has all keys, and no schema."""
    (tmp_path / "config.yaml").write_text(text := write_config(build_config()))
    given = ["--config-dir", str(tmp_path), "-cn", "config"]
    with pytest.raises(UserError, match="^-cn config: it lacks the types of the keys; begin the file with 'defaults: "):
        check_command_line(given, CONF, "base")
    (tmp_path / "config.yaml").write_text(BASE + text)
    check_command_line(given, CONF, "base")


def test_a_user_defined_folder_is_searched_too(tmp_path: Path) -> None:
    register_schema()
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "quiz.yaml").write_text("defaults: [sft, _self_]\nprompt_field: question\n")
    (tmp_path / "mine.yaml").write_text("defaults: [base, _self_]\nnum_stages: 3\n")
    given = ["--config-dir", str(tmp_path), "-cn", "mine", "data=quiz"]
    check_command_line(given, CONF, "base")
    options = get_args_parser().parse_args(given)
    composed = compose_command(options, options.overrides, CONF, "base")
    assert (composed.num_stages, composed.data.prompt_field) == (3, "question")
    with pytest.raises(UserError, match="unknown key 'num_stage'; did you mean 'num_stages'?"):
        check_command_line([*given, "num_stage=2"], CONF, "base")
    with pytest.raises(UserError, match="-cn other: .*; --config-dir has mine, and conf/ [0-9]+ others"):
        check_command_line([*given[:2], "-cn", "other"], CONF, "base")
    own = ", ".join(sorted([*KINDS, "quiz"]))
    with pytest.raises(
        UserError, match=f"data=quizz: there is no conf/data/quizz.yaml; did you mean quiz\\? there are {own}"
    ):
        check_command_line([*given[:-1], "data=quizz"], CONF, "base")


def test_a_secret_of_a_tracker_may_be_in_the_environment() -> None:
    check_command_line(
        ["+logger.trackers.mine={_target_: mine.Tracker, api_key: '${oc.env:HOME}'}"], CONF, "llama_tiny_pp2"
    )


@pytest.mark.parametrize("line", ["'output_dir=a${oc.env:HOME}b'", "'data.cache_dir=${output_dir}/cache'"])
def test_an_interpolation_is_refused(line: str) -> None:
    assert message_of(line) == (
        f"{shlex.split(line)[0]}: ${{...}} on the command line is neither replaced nor taken as text; write the value "
        "itself, or a shell variable outside of single quotes"
    )
