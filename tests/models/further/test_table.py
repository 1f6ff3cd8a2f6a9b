"""Models with layers that predict further tokens: their layers, the weights of these, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.families import build_family_config
from support.further import NUMBERED, PREFIXED, save_with_further
from support.model_folders import convert, export
from support.tiny import save_llama, save_tokenizer

from errors import UserError
from models.architecture.lookup import build_layers
from models.further.table import count_tail, set_trained
from models.layers.decoder import PipelineDecoderLayer
from models.weights.edits import edit_weights
from models.weights.further import FurtherLayers, choose_further
from models.weights.sources import open_weights


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("further")
    save_with_further(root / "deepseek_v3", "deepseek_v3", depths=2, tied=True)
    save_tokenizer(root / "deepseek_v3")
    convert(root / "deepseek_v3", root / "converted")
    return root


def test_they_are_between_the_norm_and_the_head_and_stay_with_it(root: Path) -> None:
    source = edit_weights(open_weights(str(root / "deepseek_v3")), [FurtherLayers()])
    layers = build_layers(source.config)
    assert [layer.hf_prefix for layer in layers[-5:]] == [
        "model.norm.", "model.embed_tokens.", "model.layers.4.", "model.layers.5.", "model.embed_tokens.",
    ]  # fmt: skip
    assert count_tail(layers) == 4 and count_tail(build_layers(open_weights(str(root / "deepseek_v3")).config)) == 1
    assert [layer.num_blocks for layer in layers[-4:]] == [1, 3, 3, 3]


def test_what_is_assembled_of_their_experts_is_held(root: Path) -> None:
    """Before any of it is read, the experts of other ranks left out."""
    source = edit_weights(open_weights(str(root / "deepseek_v3")), [FurtherLayers()])
    index = len(source.layers) - 2
    layer, stacks = source.layers[index], ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    held = sum(tensor.nbytes for name, tensor in source.read_layer(index, layer).items() if name in stacks)
    assert layer.hf_prefix == "model.layers.5." and held > 0
    assert source.count_held(index, layer) == held
    half = len(layer.get_pieces(stacks[1])) // 2
    assert source.count_held(index, replace(layer, experts=dict.fromkeys(stacks, range(half)))) == held // 2
    assert source.count_held(0, source.layers[0]) == source.before.count_held(0, source.layers_before[0])


@pytest.mark.parametrize(("family", "fields"), [("deepseek_v3", {"num_nextn_predict_layers": 2}), ("qwen3_next", {})])
def test_each_has_a_number_of_its_own_after_the_decoder_layers(family: str, fields: dict[str, int]) -> None:
    """Two layers would share what is reported by layer otherwise."""
    config = build_family_config(family, **fields)
    set_trained(config, trains=True)
    modules = [layer.build_on_meta() for layer in build_layers(config)]
    numbers = [module.number_in_model for module in modules if isinstance(module, PipelineDecoderLayer)]
    assert numbers == list(range(config.num_hidden_layers + fields.get("num_nextn_predict_layers", 1)))


@pytest.mark.parametrize("form", ["deepseek_v3", "converted"])
def test_their_weights_are_read_from_what_is_passed_through(root: Path, form: str) -> None:
    published = load_file(root / "deepseek_v3/model.safetensors")
    source = edit_weights(open_weights(str(root / form)), [FurtherLayers()])
    layers = build_layers(source.config)
    source.check_complete(layers)
    assert source.list_passthrough() == []
    for index, layer in enumerate(layers):
        for name, tensor in source.read_layer(index, layer).items():
            for piece in layer.get_pieces(name):
                assert torch.equal(tensor[piece.index], published[piece.hf_name]), piece.hf_name
                if layer.is_further:
                    del published[piece.hf_name]
    left = {name for name in published if name.startswith(("model.layers.4.", "model.layers.5."))}
    assert {name.split(".", 3)[3] for name in left} == {"embed_tokens.weight", "shared_head.head.weight"}


def test_a_conversion_still_passes_them_through(root: Path, tmp_path: Path) -> None:
    before, after = load_file(root / "deepseek_v3/model.safetensors"), export(root / "converted", tmp_path / "hf")
    found = load_file(after / "model.safetensors")
    assert before.keys() == found.keys() and all(torch.equal(found[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("missing", "has no tensor 'model.layers.4.eh_proj.weight' (1 of the layers"),
        ("differs", "'model.layers.5.shared_head.head.weight' differs from 'model.embed_tokens.weight'"),
    ],
)
def test_weights_that_do_not_fit_are_refused(root: Path, tmp_path: Path, change: str, message: str) -> None:
    tensors = load_file(root / "deepseek_v3/model.safetensors")
    if change == "missing":
        del tensors["model.layers.4.eh_proj.weight"]
    else:
        tensors["model.layers.5.shared_head.head.weight"] += 1
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text((root / "deepseek_v3/config.json").read_text())
    source = edit_weights(open_weights(str(tmp_path)), [FurtherLayers()])
    with pytest.raises(UserError) as raised:
        source.check_complete(build_layers(source.config))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("llama", {}, "what the further layers of a 'llama' compute is not known here, only those of deepseek_v3, "),
        ("glm4_moe", {"num_nextn_predict_layers": 0}, "config.json of this 'glm4_moe' counts no layers that predict"),
        (
            PREFIXED[0],
            {"mtp_num_hidden_layers": 2},
            "with 2 layers that predict further tokens is not supported, at mo",
        ),
    ],
)
def test_a_model_without_known_layers_is_refused(family: str, fields: dict, message: str) -> None:
    with pytest.raises(UserError) as raised:
        set_trained(build_family_config(family, **fields), trains=True)
    assert message in str(raised.value)


def test_a_model_that_does_not_train_them_is_as_it_was(tmp_path: Path) -> None:
    save_llama(tmp_path)
    source = open_weights(str(tmp_path))
    assert choose_further(source, trains=False) == []
    config = build_family_config(NUMBERED[0], num_nextn_predict_layers=1)
    names = [layer.hf_prefix for layer in build_layers(config)]
    set_trained(config, trains=True)
    assert len(build_layers(config)) == len(names) + 2
    set_trained(config, trains=False)
    assert [layer.hf_prefix for layer in build_layers(config)] == names
