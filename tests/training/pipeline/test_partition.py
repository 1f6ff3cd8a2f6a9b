"""Where the layers are cut: the best of all cuts, by what each layer costs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from errors import UserError
from models.architecture.lookup import build_layers
from models.layers.layer import Layer
from training.costs.simulation import simulate
from training.pipeline.partition import ALIKE, balance, balance_chunks, split_layers, weigh_layers
from training.pipeline.schedule import Interleaved, OneForwardOneBackward

D, I, V, HEADS, KV_HEADS, DECODERS = 16, 24, 200, 4, 2, 6
DECODER_WORK = (
    D * D * (HEADS + 2 * KV_HEADS) // HEADS + D * D + 3 * D * I
)  # query, key and value; output; the three of the MLP

LAYERS = st.tuples(st.integers(0, 9), st.integers(1, 9))  # (weight, size)
WEIGHTS = st.lists(st.sampled_from((0, 1, 2, 3, 7)) | st.integers(0, 50), min_size=1, max_size=8)


def build(tied: bool = False) -> list[Layer]:
    return build_layers(
        LlamaConfig(
            vocab_size=V, hidden_size=D, intermediate_size=I, num_hidden_layers=DECODERS, num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS, tie_word_embeddings=tied,
        )
    )  # fmt: skip


def stages(weights: list[int], bounds: list[int]) -> list[int]:
    return [sum(weights[start:stop]) for start, stop in itertools.pairwise(bounds)]


def list_cuts(weights: list[int], num_stages: int) -> Iterator[list[int]]:
    """Yields the bounds of every split."""
    for cut in itertools.combinations(range(1, len(weights)), num_stages - 1):
        yield [0, *cut, len(weights)]


def judge(weights: list[int], bounds: list[int]) -> tuple[int, int]:
    """Returns what is smallest for the best split: the slowest stage, then how uneven the others are."""
    found = stages(weights, bounds)
    return max(found), sum(weight * weight for weight in found)


@given(WEIGHTS, st.integers(1, 8))
def test_balance_is_the_best_of_all_cuts(weights: list[int], most_stages: int) -> None:
    num_stages = min(most_stages, len(weights))
    bounds = balance(weights, num_stages)
    assert bounds[0] == 0 and bounds[-1] == len(weights) and len(bounds) == num_stages + 1
    assert all(start < stop for start, stop in itertools.pairwise(bounds))
    assert judge(weights, bounds) == min(judge(weights, cut) for cut in list_cuts(weights, num_stages))


def balance_under_cap(layers: list[tuple[int, int]], most_stages: int, cap: int) -> str:
    """Holds the split of layers, (weight, size) each, against all that fit, and returns which it is. Earlier stages
    hold more micro-batches, so the same layers may fit on a later one only."""
    weights, sizes = map(list, zip(*layers))
    num_stages = min(most_stages, len(weights))

    def fits(stage: int, start: int, stop: int) -> bool:
        return sum(sizes[start:stop]) * (num_stages - stage) <= cap

    fitting = [
        cut
        for cut in list_cuts(weights, num_stages)
        if all(fits(stage, *bounds) for stage, bounds in enumerate(itertools.pairwise(cut)))
    ]

    def find_stop(stage: int, start: int) -> int:
        return max(stop for stop in range(start, len(weights) + 1) if stop == start or fits(stage, start, stop))

    bounds = balance(weights, num_stages, find_stop)
    if bounds is None:
        assert not fitting
        return "none"
    assert bounds in fitting and judge(weights, bounds) == min(judge(weights, cut) for cut in fitting)
    return "the best of all" if bounds == balance(weights, num_stages) else "another"


def time_step(weights: list[int], bounds: list[int], num_micro_batches: int) -> float:
    """The simulated step under 1F1B: a backward pass takes twice as long as a forward pass, a transfer no time."""
    forward, num_stages = [weight / 3 for weight in stages(weights, bounds)], len(bounds) - 1
    schedule = OneForwardOneBackward(num_stages, num_micro_batches)
    passes = simulate(schedule, forward, [2 * seconds for seconds in forward], [0.0] * (num_stages - 1))
    return max(each.stop for each in passes)


@given(st.lists(st.integers(90, 110), min_size=1, max_size=10), st.integers(1, 4), st.integers(0, 8))
def test_of_splits_that_are_as_even_the_one_with_the_shortest_step_is_taken(
    weights: list[int], most_stages: int, further: int
) -> None:
    num_stages = min(most_stages, len(weights))
    num_micro_batches = num_stages + further
    bounds = balance(weights, num_stages, schedule=OneForwardOneBackward(num_stages, num_micro_batches))
    heaviest = {tuple(cut): max(stages(weights, cut)) for cut in list_cuts(weights, num_stages)}
    even = [cut for cut, weight in heaviest.items() if weight <= ALIKE * min(heaviest.values())]
    assert tuple(bounds) in even
    best = min(time_step(weights, list(cut), num_micro_batches) for cut in even)
    assert time_step(weights, bounds, num_micro_batches) <= 1.01 * best


@pytest.mark.parametrize("num_micro_batches", [4, 8, 64])
def test_a_stage_with_a_layer_more_is_an_early_one(num_micro_batches: int) -> None:
    """It is not next to the last stage, which waits for it."""
    bounds = balance([3] * 10, 4, schedule=OneForwardOneBackward(4, num_micro_batches))
    assert stages([3] * 10, bounds) == [9, 9, 6, 6]
    late = time_step([3] * 10, [0, 2, 4, 7, 10], num_micro_batches)
    assert time_step([3] * 10, bounds, num_micro_batches) <= late - 3


@given(st.lists(LAYERS, min_size=1, max_size=8), st.integers(1, 8), st.integers(5, 60))
def test_balance_under_a_cap_is_the_best_of_all_cuts_that_fit(
    layers: list[tuple[int, int]], most_stages: int, cap: int
) -> None:
    balance_under_cap(layers, most_stages, cap)


@pytest.mark.parametrize(("cap", "found"), [(5, "none"), (10, "another"), (12, "the best of all")])
def test_a_cap_moves_layers_to_later_stages(cap: int, found: str) -> None:
    assert balance_under_cap([(1, 3)] * 4, 2, cap) == found


@pytest.mark.parametrize("head", [0, 1, 3, 5, 8])
@pytest.mark.parametrize("num_stages, num_chunks", [(2, 2), (3, 2), (2, 3)])
def test_chunks_are_the_best_of_all_cuts_of_a_decoder(num_stages: int, num_chunks: int, head: int) -> None:
    for num_decoders in range(num_stages * num_chunks - 2, 11):
        weights = [0, *[3] * num_decoders, 0, head]

        def judge_chunks(bounds: list[int], weights: list[int] = weights) -> tuple[list[int], list[int]]:
            chunks = stages(weights, bounds)
            return sorted((sum(chunks[stage::num_stages]) for stage in range(num_stages)), reverse=True), sorted(
                chunks, reverse=True
            )

        shard_specs = itertools.combinations(range(1, len(weights)), num_stages * num_chunks - 1)
        bounds = balance_chunks(weights, Interleaved(num_stages, num_stages, num_chunks))
        assert judge_chunks(bounds) == min(judge_chunks([0, *cut, len(weights)]) for cut in shard_specs)


def test_uniform_counts_layers_and_parameters_counts_weights() -> None:
    layers = build()
    assert split_layers(weigh_layers(layers, "uniform"), 3, "uniform") == [0, 3, 6, 9]
    sizes = [V * D, *[DECODER_WORK + 2 * D] * DECODERS, D, V * D]
    assert split_layers(weigh_layers(layers, "parameters"), 2, "parameters") == balance(sizes, 2)
    assert split_layers(weigh_layers(build(tied=True), "parameters"), 2, "parameters") == balance([*sizes[:-1], 0], 2)


def test_a_list_is_taken_as_it_is() -> None:
    assert split_layers(weigh_layers(build(), [1, 2, 6]), 3, [1, 2, 6]) == [0, 1, 3, 9]
    assert split_layers(weigh_layers(build(), [1, 2, 2, 4]), 2, [1, 2, 2, 4], schedule=Interleaved(2, 2, 2)) == [
        0,
        1,
        3,
        5,
        9,
    ]
    with pytest.raises(
        UserError,
        match=r"to 2 stages; it must give 9 layers .* to num_stages=2 x 2 chunks, at least one each",
    ):
        split_layers(weigh_layers(build(), [5, 4]), 2, [5, 4], schedule=Interleaved(2, 2, 2))


def test_a_type_is_spread_over_the_stages() -> None:
    layers = build()
    bounds = split_layers(weigh_layers(layers, "type:decoder"), 3, "type:decoder")
    matches = [int(layer.module_class.__name__ == "DecoderLayer") for layer in layers]
    assert stages(matches, bounds) == [2, 2, 2]


@pytest.mark.parametrize(
    ("method", "parts"),
    [
        ("fair", ("partition_method=fair is unknown", "balanced, uniform, parameters, type:REGEX, or a list")),
        (None, ("partition_method=None is unknown",)),
        (3, ("partition_method=3 is unknown",)),
        ("type:mamba", ("partition_method=type:mamba matches no layer", "DecoderLayer, Embedding, FinalNorm, LMHead")),
        ("type:(", ("partition_method=type:( is not a valid regular expression",)),
        ([4, 4], ("[4, 4] gives 8 layers to 2 stages", "must give 9 layers", "num_stages=3")),
        ([4, 4, 2], ("gives 10 layers to 3 stages",)),
        ([9, 0, 0], ("at least one each",)),
        ([], ("gives 0 layers to 0 stages",)),
        ([4, "a", 4], ("must list whole numbers",)),
    ],
)
def test_a_method_that_cannot_be(method: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(UserError) as caught:
        split_layers(weigh_layers(build(), method), 3, method)
    assert all(part in str(caught.value) for part in parts), caught.value


def test_a_tail_stays_in_one_chunk() -> None:
    """Layers for further tokens, and the head: their weight counts as one."""
    weights = [0, 4, 4, 4, 4, 1, 0, 5, 3]
    for num_stages in (1, 2, 3, 4):
        bounds = split_layers(weights, num_stages, "balanced", tail=3)
        assert bounds[-1] == len(weights) and bounds[-2] <= len(weights) - 3
    assert split_layers(weights, 2, "balanced", tail=3) == [0, 4, 9]
    asked: list[tuple[int, int]] = []

    def find_stop(stage: int, start: int) -> int:
        asked.append((stage, start))
        return 9

    assert split_layers(weights, 2, "balanced", tail=3, find_stop=find_stop) == [0, 4, 9]
    assert (1, 4) in asked


def test_a_list_that_cuts_the_tail_is_refused() -> None:
    assert split_layers([1] * 9, 2, [6, 3], tail=3) == [0, 6, 9]
    with pytest.raises(UserError, match=r"partition_method=\[7, 2\]: the last 3 layers"):
        split_layers([1] * 9, 2, [7, 2], tail=3)


@given(WEIGHTS, st.sets(st.integers(1, 7)), st.integers(1, 8))
def test_joined_layers_stay_with_the_one_before(weights: list[int], numbers: set[int], most_stages: int) -> None:
    """By the best of the cuts that are left."""
    joined = {number for number in numbers if number < len(weights)}
    num_stages = min(most_stages, len(weights) - len(joined))
    bounds = split_layers(weights, num_stages, "balanced", joined=joined)
    left = [cut for cut in list_cuts(weights, num_stages) if joined.isdisjoint(cut)]
    assert bounds in left and judge(weights, bounds) == min(judge(weights, cut) for cut in left)


def test_chunks_begin_with_no_joined_layer() -> None:
    bounds = split_layers([0, *[4] * 8, 0, 3], 2, "balanced", schedule=Interleaved(2, 2, 2), joined=[3, 4, 6])
    assert len(bounds) == 5 and not {3, 4, 6} & set(bounds)


def test_a_list_that_cuts_before_a_joined_layer_is_refused() -> None:
    assert split_layers([1] * 9, 2, [5, 4], joined=[3, 4]) == [0, 5, 9]
    message = (
        r"partition_method=\[4, 5\]: a stage cannot begin with layer 4 .*; the nearest that it can begin with is 5"
    )
    with pytest.raises(UserError, match=message):
        split_layers([1] * 9, 2, [4, 5], joined=[3, 4])
