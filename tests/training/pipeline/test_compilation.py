"""The compilation of layers: one function for all of them, the limit of its variants, and parts that are left out."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.compiler.config as compiler
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from support.adapters import build_lora
from support.families import FAMILIES, build_family_config
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.callback import callback_handler
from torch._dynamo.utils import counters
from torch._inductor.runtime.cache_dir_utils import cache_dir
from transformers import LlamaConfig, PretrainedConfig

import console
from models.architecture.lookup import build_layers, choose_attention
from models.layers.decoder import PipelineDecoderLayer
from training.config.schema import CheckpointMode
from training.pipeline import compilation
from training.pipeline.activation_checkpoint import ActivationCheckpointing, may_draw
from training.pipeline.compilation import compile_layers

B, T, D = 2, 12, 32
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
RECOMPUTED = ActivationCheckpointing(1, in_layers=True)
SELECTIVE = ActivationCheckpointing(1, CheckpointMode.selective, in_layers=True)


class Backend:
    """A compiler that leaves the operators of the two passes as they are, and counts: graphs that were made, runs of
    those, and the products in these runs."""

    num_graphs = num_runs = num_products = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        self.num_graphs += 1
        compile_passes: Any = aot_autograd(
            fw_compiler=self._count,
            bw_compiler=self._count,
            inference_compiler=self._count,
            partition_fn=min_cut_rematerialization_partition,
        )
        return compile_passes(graph, inputs)

    def _count(self, graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        products = sum(node.target in PRODUCTS for node in graph.graph.nodes)

        def run(*values: Any) -> Any:
            self.num_runs += 1
            self.num_products += products
            return graph(*values)

        return make_boxed_func(run)

    def count(self, layers: Sequence[PipelineDecoderLayer], **options: Any) -> tuple[float, float]:
        """Run the layers; return runs of graphs and products, for each layer."""
        runs, products = self.num_runs, self.num_products
        differentiate(layers, **options) if layers[0].training else evaluate(layers)
        return (self.num_runs - runs) / len(layers), (self.num_products - products) / len(layers)


@pytest.fixture(autouse=True)
def forget_compiled() -> Iterator[None]:
    limit = compiler.recompile_limit
    yield
    compiler.recompile_limit = limit
    torch.compiler.reset()
    compilation.logging.getLogger("torch._dynamo.convert_frame").handlers.clear()


@pytest.fixture
def backend() -> Iterator[Backend]:
    """Returns the compiler that `compile_layers` uses."""
    counting = Backend()
    with patch.object(torch, "compile", partial(torch.compile, backend=counting)):
        yield counting


def build(num_layers: int, checkpointing: ActivationCheckpointing | None = None, *, adapted: bool = False) -> list[Any]:
    config = LlamaConfig(hidden_size=D, intermediate_size=48, num_hidden_layers=num_layers, num_attention_heads=4)
    return build_decoder_layers(config, checkpointing, adapted=adapted)


def build_decoder_layers(
    config: PretrainedConfig, checkpointing: ActivationCheckpointing | None = None, *, adapted: bool = False
) -> list[Any]:
    """Return the decoder layers of a model, in training."""
    config._attn_implementation = choose_attention(config, "auto")
    specs = build_layers(config)
    lora, modules = build_lora(specs), list[Any]()
    for index, spec in enumerate(specs):
        if not issubclass(spec.module_class, PipelineDecoderLayer):
            continue
        torch.manual_seed(index)
        module = spec.module_class(*spec.args)
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        if adapted:
            lora.attach(module, index, spec)
        modules.append(module.train())
    recompute = checkpointing and checkpointing.build_function(may_draw(modules))
    for module in modules:
        module.recompute = recompute
    return modules


def make_inputs(width: int, length: int = T, requires_grad: bool = False) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    integers = torch.arange(length).expand(B, length).clone(), torch.ones(B, length, dtype=torch.int32)
    return torch.randn(B, length, width, requires_grad=requires_grad), *integers


def run(layers: Sequence[Any], inputs: Any) -> torch.Tensor:
    for layer in layers:
        inputs = layer(inputs)
    return inputs[0]


def differentiate(layers: Sequence[Any], width: int = D, length: int = T) -> list[torch.Tensor]:
    """Return the gradients of the inputs and of all trained parameters."""
    inputs = make_inputs(width, length, requires_grad=True)
    trained = [parameter for layer in layers for parameter in layer.parameters() if parameter.requires_grad]
    return list(torch.autograd.grad(run(layers, inputs).square().mean(), [inputs[0], *trained]))


def evaluate(layers: Sequence[Any]) -> torch.Tensor:
    with torch.no_grad():
        return run(layers, make_inputs(D))


def compare(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for each, other in zip(found, expected, strict=True):
        torch.testing.assert_close(each, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("checkpointing", "adapted", "num_products"),
    [
        pytest.param(None, False, 21, id="kept"),
        pytest.param(RECOMPUTED, False, 27, id="recomputed"),  # all but `down_proj`, which no gradient needs
        pytest.param(SELECTIVE, False, 21, id="selective"),
        pytest.param(RECOMPUTED, True, 7 * (3 + 5 + 3) - 2, id="lora"),
    ],
)
def test_forty_layers_share_a_graph_for_training_and_one_for_evaluation(
    backend: Backend, checkpointing: ActivationCheckpointing | None, adapted: bool, num_products: int
) -> None:
    layers = build(40, checkpointing, adapted=adapted)
    expected = differentiate(layers), evaluate(layers)
    compile_layers(layers, rank=0)
    compare(differentiate(layers), expected[0])
    assert backend.num_graphs == 1 and backend.num_runs == 80
    assert backend.count(layers) == (2, num_products)
    for layer in layers:
        layer.eval()
    compare([evaluate(layers)], [expected[1]])
    assert backend.num_graphs == 2
    assert backend.count(layers) == (1, 7 * (3 if adapted else 1))
    for layer in layers:
        layer.train()
    assert backend.count(layers) == (2, num_products) and backend.num_graphs == 2


def test_groups_of_layers_that_the_engine_recomputes_share_a_graph_too(backend: Backend) -> None:
    layers = build(4)
    expected = differentiate(layers)
    compile_layers(layers, rank=0)
    recompute = ActivationCheckpointing(2).build_function(draws=False)
    inputs = make_inputs(D, requires_grad=True)
    outputs: Any = inputs
    for group in (layers[:2], layers[2:]):
        outputs = recompute(lambda *values, group=group: (run(group, values), *values[1:]), *outputs)
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    compare(torch.autograd.grad(outputs[0].square().mean(), [inputs[0], *parameters]), expected)
    assert backend.num_graphs == 1 and backend.num_products == 28 * len(layers)


@pytest.mark.parametrize("checkpointing", [RECOMPUTED, SELECTIVE], ids=["recomputed", "selective"])
def test_what_was_dropped_is_dropped_again(backend: Backend, checkpointing: ActivationCheckpointing) -> None:
    """Else gradients would be those of another draw than without recomputation."""
    gradients = []
    for each in (None, checkpointing):
        layers = build_decoder_layers(build_family_config("gpt2", n_layer=1, resid_pdrop=0.5), each)
        compile_layers(layers, rank=0)
        gradients.append(differentiate(layers, width=48))  # which sets the seed
    compare(*gradients)
    assert not torch.allclose(gradients[0][0], differentiate([layer.eval() for layer in layers], width=48)[0])


def test_lengths_that_change_make_one_more_graph(backend: Backend) -> None:
    layers = build(3, RECOMPUTED)
    expected = {length: differentiate(layers, length=length) for length in (8, 11, 14)}
    compile_layers(layers, rank=0)
    for length, gradients in expected.items():
        compare(differentiate(layers, length=length), gradients)
    assert backend.num_graphs == 2


@pytest.mark.parametrize(
    "checkpointing",
    [pytest.param(RECOMPUTED, id="recomputed"), pytest.param(SELECTIVE, id="selective", marks=pytest.mark.full)],
)
def test_what_is_around_a_part_that_cannot_be_compiled_is(
    backend: Backend, checkpointing: ActivationCheckpointing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is torch's then, and each recomputation has the documents of its own micro-batch, although two are
    in flight, as in a pipeline stage."""
    layers = build(3, checkpointing)
    context, seen = layers[0].context, []
    context.locates_tokens = True
    for layer in layers:
        inner = layer.mlp.forward

        @torch.compiler.disable
        def forward(x: torch.Tensor, inner: Any = inner) -> torch.Tensor:
            seen.append(context.tokens)
            return inner(x)

        layer.mlp.forward = forward

    def run_both() -> list[torch.Tensor]:
        seen.clear()
        losses = [run(layers, make_inputs(D, length, requires_grad=True)).square().mean() for length in (8, 11)]
        sum(losses).backward()
        return [parameter.grad for layer in layers for parameter in layer.parameters()]

    expected = [gradient.clone() for gradient in run_both()]
    for layer in layers:
        layer.zero_grad()
    compile_layers(layers, rank=0)
    compare(run_both(), expected)
    assert backend.num_graphs > 0
    first, second = (len(seen[0].documents), len(seen[3].documents))
    assert (first, second) == (B * 8, B * 11)
    assert [len(tokens.documents) for tokens in seen] == [*[first] * 3, *[second] * 3, *[second] * 3, *[first] * 3]


SHORT = ("gemma2", "mpt")  # layers with a window and without one, in turn; layers that return a tuple
OTHERS = ("bloom", "qwen3_moe")


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.full) for name in (*FAMILIES, *OTHERS)]
)
def test_layers_of_every_family(backend: Backend, name: str) -> None:
    """A graph for each kind of layer."""
    fields: dict[str, Any] = {"gpt2": {"scale_attn_by_inverse_layer_idx": False}}  # else each layer is a kind
    fields |= {indexed: {"index_topk": T} for indexed in ("deepseek_v32", "glm_moe_dsa")}  # scores are not compiled
    config = build_family_config(name, **fields.get(name, {}))
    layers = build_decoder_layers(config, RECOMPUTED)
    expected = differentiate(layers, config.hidden_size)
    compile_layers(layers, rank=0)
    compare(differentiate(layers, config.hidden_size), expected)
    assert backend.num_graphs <= 3 < len(layers)


@pytest.mark.full
@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
@pytest.mark.parametrize("checkpointing", [None, RECOMPUTED, SELECTIVE], ids=["kept", "recomputed", "selective"])
def test_layers_whose_queries_select_keys(
    backend: Backend, name: str, checkpointing: ActivationCheckpointing | None
) -> None:
    """A selection of keys runs uncompiled, and the operators around it are compiled."""
    config = build_family_config(name)
    assert config.index_topk < T
    layers = build_decoder_layers(config, checkpointing)
    expected = differentiate(layers, config.hidden_size)
    compile_layers(layers, rank=0)
    compare(differentiate(layers, config.hidden_size), expected)
    assert backend.num_graphs > 0


def test_compiling_is_progress(backend: Backend) -> None:
    """So the watchdog does not take a rank that compiles for long for one that is stuck."""
    (layer,) = build(1)
    compile_layers([layer], rank=0)
    reported: list[int] = []
    with console.listen_to_progress(lambda: reported.append(backend.num_graphs)):
        run([layer], make_inputs(D))
        assert reported == [0, 1]  # before the only graph, and after it
        run([layer], make_inputs(D))
        assert reported == [0, 1]
    compile_layers([layer], rank=0)
    assert len(callback_handler.start_callbacks) == 1


@pytest.mark.parametrize("is_named", [False, True])
def test_compiled_code_is_kept_with_the_data_or_where_the_user_says(
    is_named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    if is_named:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "named"))
    assert Path(cache_dir()) != tmp_path / "compiled"  # which sets the variable, as the import of torch does
    compilation.keep_compiled(tmp_path / "compiled")
    assert Path(cache_dir()) == tmp_path / ("named" if is_named else "compiled")


@pytest.mark.full
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_what_was_compiled_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler is reset in between, as in another process that has the folder."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    layers = build(1, RECOMPUTED)
    compile_layers(layers, rank=0)
    misses = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        differentiate(layers)
        misses.append(counters["inductor"]["fxgraph_cache_miss"])
    assert misses == [2, 0]  # a graph for each of the two passes
    assert len(list((tmp_path / "fxgraph").glob("*/*"))) == 2


class Scaled(PipelineDecoderLayer):
    """Each factor is compiled by itself: torch takes a module's integers for constants."""

    def __init__(self, factor: int) -> None:
        torch.nn.Module.__init__(self)
        self.factor = factor

    def forward(self, inputs: Any) -> Any:
        return (self.run(None, None, inputs[0]),)

    def transform(self, hidden_states: torch.Tensor, **given: Any) -> torch.Tensor:
        return hidden_states * self.factor


def run_kinds(num_kinds: int) -> list[str]:
    """Returns what is said on the screen."""
    said: list[str] = []
    layers = [Scaled(factor) for factor in range(num_kinds)]
    with patch.object(console, "say", said.append):
        compile_layers(layers, rank=3)
        for factor, layer in enumerate(layers):
            assert layer((torch.ones(2),))[0].tolist() == [factor, factor]
    return said


def test_a_dozen_kinds_of_layers_are_compiled(backend: Backend) -> None:
    assert run_kinds(12) == [] and backend.num_graphs == 12


def test_the_limit_is_named_once_with_the_way_out(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "VARIANTS", 2)
    compiler.recompile_limit = 2
    (line,) = [*run_kinds(6), *run_kinds(6)]
    assert line.startswith("warning: compile=true: rank 3 has compiled 2 variants of a layer")
    assert "data.pad_to=max_seq_length" in line and "compile=false" in line
