"""Layer by layer is the whole model; plain weights of quantized checkpoints are the reference's."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from extractor.layerwise import LayerByLayer, NoReference
from extractor.verbs.reference import relative
from tests.support.models import build_weights, cache_folder
from tests.support.reference import Reference, _layers

IDS = torch.arange(3, 24) * 7


def layers_of(model: Path) -> int:
    config = json.loads((model / "config.json").read_text())
    return config.get("text_config", config)["num_hidden_layers"]


@pytest.mark.parametrize(
    "name",
    [
        "tiny_llama",
        "tiny_qwen3moe",
        "tiny_kimi",  # a wrapper that transformers does not know
        pytest.param("tiny_gemma3", marks=pytest.mark.slow),
        pytest.param("tiny_gptoss", marks=pytest.mark.slow),
        pytest.param("tiny_llama4", marks=pytest.mark.slow),
        pytest.param("tiny_qwen3next", marks=pytest.mark.slow),
    ],
)
def test_each_layer_is_that_of_the_whole_model(
    build_model: Callable[[str], Path], name: str
) -> None:
    model = build_model(name)
    plain = model / "reference"
    want = Reference(plain if plain.is_dir() else model).states(IDS)
    layered = LayerByLayer(model, layers_of(model))
    last = str(len(layered.layers) - 1)
    with layered.filled("embed", "rest"):
        assert relative(layered.embed(IDS), want["embed"]) < 1e-6
        assert relative(layered.final(IDS, want[last]), want["final"]) < 1e-6
    for k in (0, 1, int(last)):
        before = want[str(k - 1) if k else "embed"]
        with layered.filled(f"layers.{k}", "rest"):
            assert relative(layered.run_layer(k, IDS, before), want[str(k)]) < 1e-6
        # What was filled is given back.
        assert all(parameter.is_meta for parameter in layered.layers[k].parameters())


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("tiny_gemma3", [[0, 1, 3, 4], [2, 5]]),  # windows
        ("tiny_kimi", [[0], [1, 2, 3, 4, 5, 6, 7, 8, 9]]),  # a dense layer, then experts
        ("tiny_llama", [[0, 1, 2, 3, 4, 5]]),
    ],
)
def test_kinds_of_layers(
    build_model: Callable[[str], Path], name: str, kinds: list[list[int]]
) -> None:
    model = build_model(name)
    assert list(LayerByLayer(model, layers_of(model)).kinds().values()) == kinds


@pytest.mark.parametrize(
    "name",
    [
        "fp8_qwen3",
        "ct_int4_qwen3",
        pytest.param("fp8_tensor_qwen3", marks=pytest.mark.slow),
        pytest.param("ct_fp8_qwen3", marks=pytest.mark.slow),
        pytest.param("ct_int8_qwen3", marks=pytest.mark.slow),
        pytest.param("fp8_qwen3moe", marks=pytest.mark.slow),
        pytest.param("fp8_dsv3", marks=pytest.mark.slow),
    ],
)
def test_plain_weights_of_a_quantized_checkpoint(name: str) -> None:
    model = build_weights(name, cache_folder())
    layered = LayerByLayer(model, 6)
    want = dict(_layers(Reference(model / "reference")._model(torch.float32))[5].named_parameters())
    with layered.filled("layers.5"):
        found = dict(layered.layers[5].named_parameters())
        assert found.keys() == want.keys()
        assert all(torch.equal(found[key].float(), want[key].float()) for key in want)


def test_a_format_without_plain_weights_is_named() -> None:
    with pytest.raises(NoReference, match="awq"):
        LayerByLayer(build_weights("awq_qwen3", cache_folder()), 6)


@pytest.fixture
def copy(build_model: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(build_model("tiny_llama"), tmp_path / "model"))


def edited(model: Path, **fields: object) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_a_class_that_transformers_does_not_have(copy: Path) -> None:
    edited(copy, model_type="no_such_model")
    with pytest.raises(NoReference, match="no class for 'no_such_model'"):
        LayerByLayer(copy, 6)


def test_a_tensor_that_is_missing_is_named(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    layered = LayerByLayer(copy, 6)
    with layered.filled("layers.2"):
        pass
    with pytest.raises(NoReference, match=r"layers\.3\.mlp\.up_proj"), layered.filled("layers.3"):
        pass


def test_a_cut_file_is_no_traceback(copy: Path) -> None:
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(NoReference, match="cannot"):
        LayerByLayer(copy, 6)
