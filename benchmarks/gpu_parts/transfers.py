"""How the ranks of a pipeline exchange tensors, without a model: does every rank end, and is what arrives right?

    RANK=... WORLD_SIZE=... python -m benchmarks.gpu_parts.transfers group LAYOUT ELEMENTS
    RANK=... WORLD_SIZE=... python -m benchmarks.gpu_parts.transfers abort LAYOUT ELEMENTS
    RANK=... WORLD_SIZE=... python -m benchmarks.gpu_parts.transfers replay STAGES WAITS

*group*: two ranks, of which one sends an activation and the other a gradient, as 1F1B does. LAYOUT is how they are
launched: `joined`, the first rank's send and receive as one group; `single`, the same with an activation of one tensor;
`mirrored`, a group for each message, as the plan of `training/pipeline/exchanges.py` has it; `apart`, the gradient on a
communicator of its own.

*abort*: two ranks exchange as with LAYOUT, and after some seconds they abort their groups. Does the device answer then?

*replay*: every schedule over STAGES ranks, by the trainer's own plan and transfers. A pass is a few matrix products,
and each tensor is filled with a number that names its message. With WAITS=1 ranks wait for their device at random, and
one of them is slow. Twice as many ranks are two replicas, whose sums are under way meanwhile.

A rank that has not ended after its time limit prints the operations that it waits in, by torch's flight recorder, and
the stack of each thread, by faulthandler, and ends.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from training.distributed import flight_recorder
from training.distributed.process import current_device, join_process_group, synchronize, take_device
from training.distributed.ranks import read_ranks
from training.pipeline.exchanges import Exchange, Message, find_input, find_output, is_local, plan_exchanges
from training.pipeline.schedule import Interleaved, OneForwardOneBackward, Schedule, Unit
from training.pipeline.transfers import Transfers
from training.pipeline.zero_bubble import ZeroBubble

_LIMITS = {"group": 8, "replay": 90, "abort": 30}  # seconds, once the ranks are connected
_SECONDS_TO_TELL = 2  # before that a rank names what it waits in: faulthandler needs no lock of Python, this does
_SECONDS_BEFORE_ABORT = 3
_LENGTHS = (2**10, 2**18, 2**22)  # elements of a replay's hidden states
_INTEGERS = 64  # of its positions, and of its segments
_SHARE_OF_WAITS = 0.2  # of passes
_SUM = 2**18  # elements


def main() -> None:
    kind, *arguments = sys.argv[1:]
    ranks = read_ranks()
    take_device(ranks)
    join_process_group()
    dist.all_reduce(torch.zeros(1, device=current_device()))
    faulthandler.dump_traceback_later(_LIMITS[kind], exit=True)
    teller = threading.Timer(_LIMITS[kind] - _SECONDS_TO_TELL, tell_waits)
    teller.daemon = True
    teller.start()
    _CHECKS[kind](*arguments)
    teller.cancel()
    synchronize()
    faulthandler.cancel_dump_traceback_later()
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # without the libraries' own ends


def tell_waits() -> None:
    """Print the operations that this rank has begun and not ended."""
    waits = flight_recorder.find_waits(flight_recorder.read_traces(), flight_recorder.list_groups())
    for operation in waits.pending:
        print(f"waits in {', '.join(operation.names)} of {operation.group}, begun {operation.number}", flush=True)


def check_abort(layout: str, elements: str) -> None:
    """Exchange as `check_group` does, abort the groups, and use the device."""
    threading.Thread(target=check_group, args=(layout, elements), daemon=True).start()
    time.sleep(_SECONDS_BEFORE_ABORT)
    start = time.monotonic()
    dist.distributed_c10d._abort_process_group()
    aborted = time.monotonic()
    answer = torch.ones(3, device=current_device()).sum().item()
    print(f"aborted in {aborted - start:.2f} s; the device says {answer:g} after {time.monotonic() - aborted:.2f} s")
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    os._exit(0)  # no group is left to meet in


def check_group(layout: str, elements: str) -> None:
    """Exchange an activation of three tensors, or of one, and a gradient."""
    rank, device, size = dist.get_rank(), current_device(), int(elements)
    own = dist.new_group() if layout == "apart" else None
    for group in (None, own) if layout == "apart" else (None,):
        _connect(1 - rank, group)
    hidden = torch.full((size,), 1.0 + rank, device=device)
    integers = [torch.ones(_INTEGERS, dtype=torch.int64, device=device) for _ in range(2)]
    activation = [hidden] if layout == "single" else [hidden, *integers]
    received = [torch.zeros_like(tensor) for tensor in (activation if rank == 1 else [hidden])]
    sent, to, back = (activation, None, own) if rank == 0 else ([hidden], own, None)
    sends = [dist.P2POp(dist.isend, tensor, 1 - rank, to) for tensor in sent]
    receives = [dist.P2POp(dist.irecv, tensor, 1 - rank, back) for tensor in received]
    groups = [sends, receives] if rank == 0 else [receives, sends]
    if rank == 0 and layout not in ("mirrored", "apart"):
        groups = [[*sends, *receives]]
    works = [dist.batch_isend_irecv(group) for group in groups]
    for work in itertools.chain(*works):
        work.wait()
    assert (received[0] == 2.0 - rank).all(), "other numbers have arrived than were sent"


def _connect(other: int, group: dist.ProcessGroup | None) -> None:
    """Open the connections of both directions, which is not what is measured."""
    sent, received = (torch.zeros(1, device=current_device()) for _ in range(2))
    operations = [dist.P2POp(dist.isend, sent, other, group), dist.P2POp(dist.irecv, received, other, group)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def check_replay(stages: str, waits: str) -> None:
    """Run all schedules, of a few numbers of micro-batches."""
    num_stages, rank, world_size = int(stages), dist.get_rank(), dist.get_world_size()
    rings = [list(range(start, start + num_stages)) for start in range(0, world_size, num_stages)]
    replicas = [list(ranks) for ranks in zip(*rings, strict=True)]
    sums, _ = dist.new_subgroups_by_enumeration(replicas)
    dist.all_reduce(torch.zeros(1, device=current_device()), group=sums)
    for schedule in list_schedules(num_stages):
        start = time.monotonic()
        transfers = Transfers(schedule, rings, rank, current_device())
        device = Device(random.Random(rank) if waits == "1" else None, rank == 1, sums if len(rings) > 1 else None)
        for length in _LENGTHS:
            transfers.forget_shapes()
            replay(schedule, rank % num_stages, transfers, device, length)
        print(f"{type(schedule).__name__}, {schedule.num_micro_batches}: {time.monotonic() - start:.2f} s", flush=True)


def list_schedules(num_stages: int) -> Iterator[Schedule]:
    for num_micro_batches in (1, num_stages, 2 * num_stages + 1):
        yield OneForwardOneBackward(num_stages, num_micro_batches)
    yield Interleaved(num_stages, 2 * num_stages, 2)
    yield ZeroBubble(num_stages, 2 * num_stages)


@dataclass
class Device:
    """The work that keeps the device of a rank busy between its exchanges.

    random: decides when the host waits; None: never. is_slow: whether it sleeps, too. sums: the group of replicas that
    sum gradients meanwhile; None without replicas.
    """

    random: random.Random | None
    is_slow: bool
    sums: dist.ProcessGroup | None
    works: list[tuple[Any, torch.Tensor]] = field(default_factory=list)

    def run_pass(self) -> None:
        if self.random is not None and self.random.random() < _SHARE_OF_WAITS:
            synchronize()
            time.sleep(0.01 if self.is_slow else 0)
        size = 64 if current_device().type == "cpu" else 2048
        factor = torch.ones(size, size, device=current_device())
        factor @ factor @ factor
        if self.sums is not None:
            bucket = torch.ones(_SUM, device=current_device())
            self.works.append((dist.all_reduce(bucket, group=self.sums, async_op=True), bucket))

    def finish(self) -> None:
        for work, bucket in self.works:
            work.wait()
            assert (bucket == dist.get_world_size(self.sums)).all(), "a sum over replicas is wrong"
        self.works.clear()


def replay(schedule: Schedule, stage: int, transfers: Transfers, device: Device, length: int) -> None:
    """Run the passes of a step on one rank. length: elements of the hidden states."""
    before, *after = plan_exchanges(schedule)[stage]
    errors: list[torch.Tensor] = []
    _exchange(transfers, before, ())
    for unit, exchanges in zip(schedule.list_units(stage), after, strict=True):
        needed = find_input(schedule, unit)
        if needed is not None:
            errors += find_errors(needed, transfers.take(needed))
        device.run_pass()
        _send(schedule, unit, transfers, exchanges, length)
    transfers.finish()
    device.finish()
    assert not errors or torch.stack(errors).max() == 0, f"other numbers have arrived than were sent: {schedule}"


def _send(schedule: Schedule, unit: Unit, transfers: Transfers, exchanges: tuple[Exchange, ...], length: int) -> None:
    """Make the result of a pass, and exchange what is planned after it."""
    output, result = find_output(schedule, unit), ()
    if output is not None:
        result = make_tensors(output, length)
        if is_local(schedule, output):
            transfers.hand_over(output, result)
    _exchange(transfers, exchanges, result)


def _exchange(transfers: Transfers, exchanges: tuple[Exchange, ...], result: tuple[torch.Tensor, ...]) -> None:
    for exchange in exchanges:
        transfers.exchange(exchange, () if exchange.sent is None else result)


def name_message(message: Message) -> int:
    """Return a number that no other message of a step has."""
    return 1 + message.is_gradient + 2 * (message.chunk + 64 * message.micro_batch)


def make_tensors(message: Message, length: int) -> tuple[torch.Tensor, ...]:
    """Return the result of a pass: a gradient, or hidden states and two tensors of integers, which are those of the
    micro-batch for all chunks."""
    device = current_device()
    hidden = torch.full((length,), float(name_message(message)), device=device)
    if message.is_gradient:
        return (hidden,)
    return hidden, *(torch.full((_INTEGERS,), message.micro_batch, device=device) for _ in range(2))


def find_errors(message: Message, tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Return how far each tensor of a message is from what was sent, on the device."""
    hidden, *integers = tensors
    return [
        (hidden - name_message(message)).abs().max(),
        *((tensor - message.micro_batch).abs().max().float() for tensor in integers),
    ]


_CHECKS: dict[str, Callable[..., None]] = {"group": check_group, "replay": check_replay, "abort": check_abort}

if __name__ == "__main__":
    main()
