"""`proof=true`: proves a run's layout on a small model, in place of training."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers import PretrainedConfig

from console import show_panel
from errors import UserError
from extensions.proof.certificate import check_passed, compare, list_facts, save_certificate
from extensions.proof.material import find_material, write_material
from extensions.proof.plain import check_provable, compute_step
from extensions.proof.small_run import derive_config, shrink_model
from extensions.proof.staged import take_step
from training.checkpoint.run_folder import RunFolder
from training.config.incompatible import CheckedConfig
from training.config.schema import RunConfig
from training.distributed import process
from training.distributed.interrupts import leave_on_signals
from training.distributed.meeting import watch_meeting
from training.distributed.process import has_accelerator
from training.distributed.ranks import Ranks, exit_on_user_error, raise_together, refuse_exits
from training.plan_command.run import describe_model
from training.resolution.readers import check_read
from training.resolution.resolve import ResolvedRun, check_keys, resolve
from training.resolution.target import Target
from training.run import agree_on_setup, build_watchdog, join_ranks
from training.setup import Run, build_setup, find_run_machine, open_source


def prove(config: RunConfig, ranks: Ranks, given: Collection[str] = ()) -> None:
    """Take a step of a small model at the layout of a run, and compare it with plain transformers. Raises UserError for
    a run that cannot be proven, and for one that is not equal."""
    watch_meeting(ranks, config.start_minutes)
    with ranks.phase("checking the run and reading the model's config"):
        described = describe_model(config).config
        run = check_run(config, ranks, given)
        with explain_small():
            small = shrink_model(run)
    folder = RunFolder(config.output_dir)
    folder.check_writable()
    log = folder.path / "logs" / f"proof_rank_{ranks.rank}.log"
    process.redirect_output_to_log(log, ranks)
    with exit_on_user_error(ranks, log=log), refuse_exits():
        prove_small(run.config, described, small, ranks)
        process.leave_process_group()


def check_run(config: RunConfig, ranks: Ranks, given: Collection[str]) -> ResolvedRun:
    """Return the run that the user asks for, as it would be split over these ranks. Raises UserError for what the run
    would refuse, and for what there is no second implementation of."""
    check_keys(config, has_accelerator=True)
    for text in check_read(CheckedConfig(config), given, continues=config.resume is not None):
        ranks.say(text)
    check_provable(config)
    machine = find_run_machine(config, ranks) if has_accelerator() else None
    return resolve(config, describe_model(config), Target(ranks.world_size, True, machine, is_planned=True))


def prove_small(config: RunConfig, architecture: PretrainedConfig, small: PretrainedConfig, ranks: Ranks) -> None:
    """Join the ranks, take the step, and compare. config, architecture: the user's. small: the small model's config.
    Raises UserError, together on all ranks."""
    material = find_material(config, ranks.world_size, small)
    if ranks.local_rank == 0:
        with ranks.phase("making a small model and tokens"):
            write_material(material, config, ranks.world_size, small)
    with leave_on_signals(ranks):
        join_ranks(ranks)
    with exit_on_user_error(ranks, reports=ranks.local_rank == 0):
        run = build_small_run(config, material, ranks)
    watchdog = build_watchdog(run)
    with leave_on_signals(ranks, watchdog.leave), watchdog:
        run = agree_on_setup(run)
        hosts = process.gather_hosts()
        staged, error = take_step(run, material), None
        if ranks.is_main:
            try:
                with ranks.phase("taking the same step by transformers"):
                    batch, device = run.setup.layout.global_batch_size, process.current_device()
                    found = compare(staged, compute_step(run.config, material, batch, device), bool(config.freeze))
                layout = run.setup.layout.describe()
                file = save_certificate(config, architecture, hosts, found, layout)
                facts = list_facts(found, describe_small(small), layout)
                show_panel(f"{Path(config.output_dir).name}: proof", facts | {"output": str(file)})
                check_passed(found)
            except UserError as mistake:
                error = mistake
        raise_together(error)


def build_small_run(config: RunConfig, material: Path, ranks: Ranks) -> Run:
    """Return the small run of a user's config. Raises UserError for what its small sizes cannot be."""
    derived = derive_config(config, ranks.world_size, material)
    with explain_small():
        check_keys(derived, has_accelerator())
        return Run.of(build_setup(derived, open_source(derived, None), ranks), ranks)


@contextmanager
def explain_small() -> Iterator[None]:
    """Say of a UserError that it is of the small model."""
    try:
        yield
    except UserError as error:
        raise UserError(f"proof=true, of its small model: {error}", error.ending) from None


def describe_small(small: PretrainedConfig) -> str:
    """Return the small model in words."""
    return f"{small.model_type}, {small.num_hidden_layers} layers of width {small.hidden_size}, random weights, fp32"
