"""Embeddings through real pipeline stages against transformers' own class and the loss of a whole batch in one process:
steps, evaluations, checkpoints at other layouts, adapters, and what is exported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from support import objective_runs
from support.cases import CHECKPOINTED, CLIPPED, LAYOUTS, ZERO_LAYOUTS, Case, merge
from support.head_runs import check_adapter_steps, save_queries
from support.objective_runs import (
    PACKED_LAYOUTS,
    TENSOR_PARALLEL,
    check_record,
    check_resumed,
    check_steps,
    convert,
    list_groups,
    replace_model,
    start_runs,
    train_answers,
)
from support.quantized import save_fp8
from support.retrieval_runs import NUM_QUERIES, compare_vectors, train_oracle
from support.tiny import find_tokenized, save_llama, save_tokenizer
from support.workers import WorkerError, WorkerGroup
from transformers import AutoModel, AutoTokenizer

from batch import Targets
from extensions.retrieval.contrast import Contrast, pool_texts, summarize_ranks
from extensions.retrieval.embedding import EmbeddingLoss
from extensions.retrieval.head import HEAD
from extensions.retrieval.keys import Pooling
from models.adapters.quantized import list_held
from models.architecture.lookup import build_layers
from models.heads.head import Labels
from models.storage.tensor_files import open_safetensors
from models.weights.edits import edit_weights
from models.weights.new_head import choose_head
from models.weights.published import read_kept
from models.weights.sources import open_weights

NEGATIVES = "data.num_negatives=2"
MEAN, MARGIN, SIZES = "embedding.pooling=mean", "embedding.margin=0.1", "embedding.matryoshka_dims=[32,16]"
# Unclipped, steps at the usual temperature make 1e-5 of a rounding of 1e-7 within five steps
SMOOTH = "embedding.temperature=0.5"
PACKED = ("data.packing=true", "max_seq_length=512", "micro_batch_size=1", "global_batch_size=4")
SMALL = ("micro_batch_size=1", SMOOTH)  # 4 micro-batches of each of two replicas


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("embedding")
    for tied in (False, True):
        save_llama(root / f"tied{tied}", tied=tied)
        save_tokenizer(root / f"tied{tied}")
    save_queries(root / "train.jsonl", NUM_QUERIES)
    return root


def build_case(root: Path, workdir: Path, layout: str, *overrides: str, tied: bool = False, steps: int = 5) -> Case:
    given = ("data=embedding", "learning_rate=0.02", *overrides)
    return objective_runs.build_case(root, workdir, layout, *given, tied=tied, steps=steps)


@pytest.mark.parametrize(
    ("layout", "tied", "overrides"),
    [
        ("pp2", True, (NEGATIVES, SIZES, MARGIN, CLIPPED, CHECKPOINTED)),
        pytest.param("pp2xdp2", False, SMALL, marks=pytest.mark.full),
        ("pp2", False, (*PACKED, NEGATIVES, MEAN, SMOOTH)),
        *(
            pytest.param(layout, True, (*PACKED, pooling, SMOOTH, CHECKPOINTED), marks=pytest.mark.full)
            for layout in ("pp1", "pp2", "pp2xdp2")
            for pooling in (MEAN, "embedding.pooling=last")
        ),
        *(
            pytest.param(layout, False, (*PACKED, NEGATIVES, SMOOTH, *overrides), marks=pytest.mark.full)
            for layout, overrides in PACKED_LAYOUTS
        ),
        *(
            pytest.param(layout, False, (NEGATIVES, MEAN, SMOOTH, CHECKPOINTED), marks=pytest.mark.full)
            for layout in (*LAYOUTS, *TENSOR_PARALLEL, *ZERO_LAYOUTS)
        ),
        *(
            pytest.param("pp2", True, (f"schedule={name}", *SMALL, *overrides), marks=pytest.mark.full)
            for name, *overrides in (("interleaved", "virtual_stages_per_rank=2"), ("zero_bubble",))
        ),
    ],
)
def test_five_sgd_steps_equal_those_of_the_whole_batch(
    workers: Callable[[int], WorkerGroup],
    root: Path,
    tmp_path: Path,
    layout: str,
    tied: bool,
    overrides: tuple[str, ...],
) -> None:
    case = build_case(root, tmp_path, layout, *overrides, tied=tied)
    result = merge(workers(case.world_size).run(train_answers, case))
    oracle = train_oracle(case, AutoModel.from_pretrained(case.model, dtype=torch.float32), compare_vectors)
    check_steps(result, oracle)


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        ("pp2", ()),
        ("dp2", (*PACKED, NEGATIVES, MEAN, SIZES)),
        *(
            pytest.param("pp2", overrides, marks=pytest.mark.full)
            for overrides in (("data.group_by_length=true", NEGATIVES), (*PACKED, MARGIN))
        ),
    ],
)
def test_copies_of_a_query_do_not_count_against_each_other(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, layout: str, overrides: tuple[str, ...]
) -> None:
    """Those that a mixture makes, in a batch, in one packed row, and on two replicas."""
    repeated = f"train_file=[{{path: {root}/train.jsonl, epochs: 4}}]"
    case = build_case(root, tmp_path, layout, repeated, SMOOTH, *overrides, steps=3)
    result = merge(workers(case.world_size).run(train_answers, case))
    batches = [list_groups(case.config(), find_tokenized(tmp_path)[0], step) for step in range(case.steps)]
    assert sum(len(set(ids)) < len(ids) for ids in batches) >= 2
    check_steps(result, train_oracle(case, AutoModel.from_pretrained(case.model, dtype=torch.float32), compare_vectors))


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_next", "falcon_h1", "mamba2", "lfm2"])
def test_no_state_passes_from_a_text_to_the_next(
    workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path, family: str
) -> None:
    """Linear attention with experts, state spaces next to attention and alone, short convolutions."""
    case = build_case(root, tmp_path, "pp2", *PACKED, NEGATIVES, MEAN, SMOOTH, CLIPPED)
    case = replace_model(case, tmp_path / "model", family)
    result = merge(workers(case.world_size).run(train_answers, case))
    oracle = train_oracle(case, AutoModel.from_pretrained(case.model, dtype=torch.float32), compare_vectors)
    check_steps(result, oracle)


@pytest.fixture
def run(workers: Callable[[int], WorkerGroup], root: Path, tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    return start_runs(workers, root, tmp_path, build_case)


PROMPTS = ("data.query_prompt='query: '", "data.document_prompt='text: '")


def embed_with_files(folder: Path, model: torch.nn.Module, texts: list[str]) -> torch.Tensor:
    """Do what sentence-transformers does with the files of a folder: tokens, pooling, normalization."""
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text())
    assert [module["path"] for module in json.loads((folder / "modules.json").read_text())][:2] == ["", "1_Pooling"]
    most = json.loads((folder / "sentence_bert_config.json").read_text())["max_seq_length"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(texts, padding=True, truncation=True, max_length=most, return_tensors="pt")
    with torch.no_grad():
        hidden_states = model.eval()(
            input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False
        ).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(2)
    if pooling["pooling_mode_mean_tokens"]:
        vectors = (hidden_states * mask).sum(dim=1) / mask.sum(dim=1)
    else:
        assert pooling["pooling_mode_lasttoken"]
        vectors = hidden_states[torch.arange(len(texts)), mask.sum(dim=1)[:, 0] - 1]
    assert vectors.shape[1] == pooling["word_embedding_dimension"]
    return torch.nn.functional.normalize(vectors)


def evaluate_export(folder: Path, model: torch.nn.Module, file: Path) -> dict[str, float]:
    """Evaluate on texts, as users do."""
    records = [json.loads(line) for line in file.read_text().splitlines()]
    prompts = json.loads((folder / "config_sentence_transformers.json").read_text())["prompts"]
    queries = embed_with_files(folder, model, [prompts["query"] + record["query"] for record in records])
    texts = [prompts["document"] + record["positive"] for record in records]
    cosines = queries @ embed_with_files(folder, model, texts).T
    ranks = (cosines >= cosines.diagonal()[:, None]).sum(dim=1)
    return {
        "eval_loss": torch.nn.functional.cross_entropy(cosines / 0.05, torch.arange(len(records))).item(),
        "eval_recall_at_1": (ranks == 1).float().mean().item(),
        "eval_mrr": (1 / ranks).mean().item(),
    }


@pytest.mark.full
@pytest.mark.parametrize(
    ("saved", "resumed", "overrides"),
    [
        ("pp2", "pp1", PROMPTS),
        ("pp2xdp2", "tp2", (MEAN, "max_seq_length=32", "learning_rate=3e-4")),
        ("zero3", "pp2", (MEAN, *PROMPTS)),
        ("pp2xdp2", "pp2", (MEAN, *PACKED, "max_seq_length=768")),
        ("pp2", "pp2", (MEAN, *PACKED, "max_seq_length=768")),
    ],
)
def test_a_run_learns_continues_at_another_layout_and_is_exported(
    run, root: Path, tmp_path: Path, saved: str, resumed: str, overrides: tuple[str, ...]
) -> None:
    """Evaluations too: 21 queries in micro-batches that do not divide them, each compared with all documents."""
    overrides = ("learning_rate=3e-3", *overrides)
    whole, ended = check_resumed(run, tmp_path, (saved, resumed), *overrides, metrics=("recall_at_1", "mrr"))
    assert whole[-1]["eval_loss"] < whole[0]["eval_loss"] and whole[-1]["eval_mrr"] > whole[0]["eval_mrr"]

    folder = tmp_path / "ended" / "hf"
    model, report = AutoModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(report.values()), report
    expected = evaluate_export(folder, model, root / "train.jsonl")
    check_record(ended[-1], expected)
    run("again", "pp2", "evaluate_only=true", f"model_name_or_path={folder}", *overrides)
    check_record(json.loads((tmp_path / "again" / "evaluation.json").read_text()), expected)
    again = run("first", "pp2", "max_steps=1", f"model_name_or_path={folder}", *overrides)
    check_record(again[0], expected)


@pytest.mark.full
def test_an_export_is_converted_bit_for_bit(run, root: Path, tmp_path: Path) -> None:
    run("first", "pp2", "max_steps=1")
    hf, converted, back = tmp_path / "first" / "hf", tmp_path / "converted", tmp_path / "back"
    convert(hf, converted)
    convert(converted, back, "--to_hf")
    tensors = [open_safetensors(next(folder.glob("*.safetensors"))) for folder in (hf, back)]
    assert set(tensors[0].keys()) == set(tensors[1].keys()) and "layers.0.mlp.up_proj.weight" in tensors[0].keys()
    assert all(torch.equal(tensors[0].get_tensor(name), tensors[1].get_tensor(name)) for name in tensors[0].keys())
    model = AutoModel.from_pretrained(back, dtype=torch.float32)
    assert evaluate_export(back, model, root / "train.jsonl") == evaluate_export(hf, model, root / "train.jsonl")


def test_frozen_weights_of_a_language_model_stay_as_they_are_published(tmp_path: Path) -> None:
    """Its tensors have other names than those of a model without a head."""
    save_fp8(tmp_path)
    before = open_weights(str(tmp_path))
    source = edit_weights(before, choose_head(before, HEAD, Labels(), seed=0))
    layer, layer_before = (build_layers(each.config)[4] for each in (source, before))
    names = list_held(layer.build_on_meta(), "fp8")
    found, expected = (
        {name: stack.dequantize(slice(None)) for name, stack in read_kept(each, own, names, torch.bfloat16).items()}
        for each, own in ((source, layer), (before, layer_before))
    )
    assert layer.hf_prefix != layer_before.hf_prefix and found.keys() == expected.keys() == set(names)
    assert len(names) > 6 and all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert source.count_held(4, layer) == before.count_held(4, layer_before) > 0


@pytest.mark.full
def test_sentence_transformers_loads_an_export(run, root: Path, tmp_path: Path) -> None:
    """Whole models, and adapters merged into theirs: the same vectors as the files say, within 1e-6."""
    library = pytest.importorskip("sentence_transformers")
    records = [json.loads(line) for line in (root / "train.jsonl").read_text().splitlines()]
    texts = [record["positive"] for record in records]
    run("whole", "pp2", "max_steps=2", *PROMPTS, MEAN)
    run("adapted", "pp2", "max_steps=2", *PROMPTS, "adapter=lora", "adapter.r=4")
    convert(tmp_path / "adapted" / "hf", tmp_path / "merged", "--to_hf")
    for folder in (tmp_path / "whole" / "hf", tmp_path / "merged"):
        model = AutoModel.from_pretrained(folder, dtype=torch.float32)
        loaded = library.SentenceTransformer(str(folder), device="cpu")
        assert loaded.max_seq_length == 256 and loaded.prompts["query"] == "query: "
        for kind in ("query", "document"):
            found = loaded.encode(texts, prompt_name=kind, convert_to_tensor=True)
            prompt = loaded.prompts[kind]
            expected = embed_with_files(folder, model, [prompt + text for text in texts])
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("layout", ["pp2", "tp2", "zero2"])
def test_adapters_are_trained_continued_and_loaded(run, root: Path, tmp_path: Path, layout: str) -> None:
    """By peft on the base model, and merged."""
    _, ended = check_resumed(run, tmp_path, (layout, "pp1"), "adapter=lora", "adapter.r=4", "learning_rate=3e-3")
    hf, merged = tmp_path / "ended" / "hf", tmp_path / "merged"
    model = PeftModel.from_pretrained(AutoModel.from_pretrained(root / "tiedFalse", dtype=torch.float32), hf)
    expected = evaluate_export(hf, model, root / "train.jsonl")
    check_record(ended[-1], expected)
    plain = evaluate_export(hf, AutoModel.from_pretrained(root / "tiedFalse"), root / "train.jsonl")
    assert plain["eval_loss"] != pytest.approx(expected["eval_loss"], rel=1e-2)  # peft has found the matrices
    convert(hf, merged, "--to_hf")
    check_record(ended[-1], evaluate_export(merged, AutoModel.from_pretrained(merged), root / "train.jsonl"))
    run("evaluated", "pp2", "evaluate_only=true", f"resume={tmp_path}/ended/checkpoints")
    check_record(json.loads((tmp_path / "evaluated" / "evaluation.json").read_text()), expected)


@pytest.mark.full
@pytest.mark.parametrize(("layout", "overrides"), [("pp1", ()), ("pp2", ()), ("zero2", ()), ("pp2", PACKED)])
def test_five_sgd_steps_with_adapters_equal_peft(
    workers: Callable[[int], WorkerGroup], run, root: Path, tmp_path: Path, layout: str, overrides: tuple[str, ...]
) -> None:
    """From an exported adapter, so that both of its matrices have gradients in the first step."""
    run("first", "pp1", "adapter=lora", "adapter.r=4", "learning_rate=1e-2", "max_steps=2", *overrides)
    adapter = tmp_path / "first" / "hf"
    # with a loss that rises, rounding grows beyond the bound
    given = ("adapter=lora", f"adapter.name_or_path={adapter}", "learning_rate=0.002", SMOOTH, CHECKPOINTED)
    case = build_case(root, tmp_path, layout, *given, *overrides)
    base = AutoModel.from_pretrained(root / "tiedFalse", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, adapter, is_trainable=True)
    result = merge(workers(case.world_size).run(train_answers, case))
    check_adapter_steps(result, train_oracle(case, model, compare_vectors))


def test_what_would_not_be_exact_is_refused(run, root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "dropout"
    save_llama(folder, attention_dropout=0.1)
    save_tokenizer(folder)
    pooled = tmp_path / "pooled"
    save_llama(pooled)
    save_tokenizer(pooled)
    (pooled / "1_Pooling").mkdir()
    (pooled / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    dense = Path(shutil.copytree(pooled, tmp_path / "dense"))
    modules = [{"idx": 0, "path": "", "type": f"sentence_transformers.models.{name}"} for name in ("Pooling", "Dense")]
    (dense / "modules.json").write_text(json.dumps(modules))
    for overrides, message in (
        ((f"model_name_or_path={dense}", MEAN), "dense/modules.json has a module 'Dense', which would be lost: only"),
        ((f"model_name_or_path={folder}",), "config.json: attention_dropout=0.1; task=embedding runs each text twice"),
        ((f"model_name_or_path={pooled}",), "embedding.pooling=last: .*1_Pooling/config.json says mean; give"),
        (("embedding.matryoshka_dims=[48]",), "embedding.matryoshka_dims=.48.: give sizes below 48, that of the model"),
        (("data.positive_field=query", "data.query_field=text"), "no field 'text'; the record has"),
    ):
        with pytest.raises(WorkerError, match=message):
            run("refused", "pp1", *overrides)
    for packed in ((), PACKED):
        with pytest.raises(WorkerError, match="context_parallel_size=2 does not go together with data=embedding"):
            run("refused", "cp2", *packed)


@pytest.mark.parametrize("pooling", Pooling)
def test_padding_is_not_pooled(pooling: Pooling) -> None:
    """Rows of 3 and 2 tokens, and one that fills the batch, with hidden states that are not finite."""
    hidden_states = torch.randn(3, 4, 5)
    hidden_states[0, 3:] = hidden_states[1, 2:] = hidden_states[2] = torch.nan
    segment_ids = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.int32)
    targets = Targets(torch.zeros(3, 4), torch.tensor([2, 5]), torch.tensor(1.0))
    found = pool_texts((hidden_states, segment_ids), targets, pooling)
    rows = (hidden_states[0, :3], hidden_states[1, :2])
    expected = [row[-1] if pooling is Pooling.last else row.mean(dim=0) for row in rows]
    torch.testing.assert_close(found, torch.stack(expected))


@pytest.mark.parametrize("pooling", Pooling)
def test_each_text_of_a_packed_row_is_pooled(pooling: Pooling) -> None:
    hidden_states = torch.randn(2, 5, 3, requires_grad=True)
    segment_ids = torch.tensor([[1, 1, 2, 2, 2], [1, 2, 2, 0, 0]], dtype=torch.int32)
    targets = Targets(torch.zeros(2, 5), torch.tensor([1, 4, 5, 7]), torch.tensor(1.0))
    found = pool_texts((hidden_states, segment_ids), targets, pooling)
    texts = (hidden_states[0, :2], hidden_states[0, 2:], hidden_states[1, :1], hidden_states[1, 1:3])
    expected = torch.stack([text[-1] if pooling is Pooling.last else text.mean(dim=0) for text in texts])
    torch.testing.assert_close(found, expected)
    weights = torch.randn(4, 3)
    gradients = [torch.autograd.grad((each * weights).sum(), hidden_states)[0] for each in (found, expected)]
    torch.testing.assert_close(*gradients)


def test_as_near_a_document_counts_against_its_own() -> None:
    """A model that gives all texts one vector finds nothing."""
    unknown = torch.ones(2, 3)
    unknown[0] = torch.nan
    everything = torch.zeros(2, 4, dtype=torch.bool)
    losses, ranks = Contrast(0.1).compare(unknown, torch.ones(4, 3), torch.tensor([0, 2]), everything)
    assert summarize_ranks(losses, ranks).isnan().all() and ranks[0].isnan().tolist() == [True, False]
    losses, ranks = Contrast(0.1).compare(torch.ones(2, 3), torch.ones(4, 3), torch.tensor([0, 2]), everything)
    assert ranks.tolist() == [[4, 4]]
    torch.testing.assert_close(losses, torch.full((2,), 4.0).log())


def test_a_step_needs_the_pass_before_it() -> None:
    loss = EmbeddingLoss(Pooling.last, Contrast(0.1), 2)
    with pytest.raises(AssertionError, match="the pass over the whole batch comes first"):
        loss((torch.zeros(2, 1, 3), torch.ones(2, 1)), Targets.find(torch.zeros(2, 1), torch.tensor(1.0)))
