"""Test checkpoints hold what their formats say, and their reference tells right from wrong."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from extractor.model import ModelSpec
from extractor.verbs.reference import judge, relative
from tests.support.models import build_weights
from tests.support.quantized import (
    AWQ_GROUP,
    INPUTS,
    INT4_GROUP,
    SCHEMES,
    Inputs,
    Tensors,
    is_quantized,
)
from tests.support.quantized_reference import quantized, reference_of
from tests.support.reference import Reference

NAME = "model.layers.1.mlp.down_proj.weight"
# AWQ's own unpacking: where in a word a row's columns 0 to 7 are, in steps of four bits.
NIBBLES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])


def unpacked(words: torch.Tensor, nibbles: torch.Tensor = NIBBLES) -> torch.Tensor:
    return ((words.unsqueeze(-1) >> nibbles * 4) & 15).flatten(-2).float()


def dequantized(stored: Tensors, shape: torch.Size) -> torch.Tensor:
    """[out, in] from what a checkpoint has of one matrix, as each format's readers do it."""
    tensors = {key.removeprefix(NAME.removesuffix("weight")): t for key, t in stored.items()}
    if "qweight" in tensors:
        zeros, scales = (
            t.repeat_interleave(AWQ_GROUP, 0)
            for t in (unpacked(tensors["qzeros"]), tensors["scales"].float())
        )
        return ((unpacked(tensors["qweight"]) - zeros) * scales).T
    if "weight_packed" in tensors:
        assert torch.equal(tensors["weight_shape"], torch.tensor(shape))
        number = unpacked(tensors["weight_packed"], torch.arange(8)) - 8
        return number * tensors["weight_scale"].float().repeat_interleave(INT4_GROUP, 1)
    number = tensors["weight"].float()
    if "weight_scale_inv" in tensors:
        blocks = tensors["weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
        return number * blocks[: shape[0], : shape[1]]
    return number * tensors["weight_scale"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_reference_has_the_checkpoints_own_weights(scheme: str) -> None:
    torch.manual_seed(0)
    rows = 384 if scheme == "awq" else 320  # 320: the last block of 128 is half full
    weight = torch.randn(rows, 256) * 0.02
    stored, value = SCHEMES[scheme].pack(NAME, weight)
    assert torch.equal(dequantized(stored, weight.shape), value)
    assert torch.equal(value.to(torch.bfloat16).float(), value)
    # Scales are far apart: another group's is no small mistake.
    scales = [t.float() for key, t in stored.items() if "scale" in key and t.numel() > 1]
    assert all(scale.max() > 1.9 * scale.min() for scale in scales)


@pytest.mark.parametrize(
    ("inputs", "steps"), [(Inputs("e4m3", 128), 1 / 16), (Inputs("int8"), 1 / 127)]
)
def test_quantized_inputs(inputs: Inputs, steps: float) -> None:
    torch.manual_seed(0)
    values = torch.randn(3, 256)
    values[:, :128] *= 1000
    found = quantized(values, inputs)
    largest = (
        values.unflatten(-1, (-1, inputs.group or 256)).abs().amax(-1).repeat_interleave(128, -1)
    )
    largest = largest if inputs.group else largest[:, :1]
    error = (found - values).abs()
    # A float is off by a part of itself, an integer by a part of its group's largest.
    bound = values.abs() if inputs.kind == "e4m3" else largest
    assert (error <= bound * steps * 1.001 + largest * 2**-18).all() and error.max() > 0
    assert torch.equal(quantized(found, inputs), found)


def test_static_scales_clamp() -> None:
    found = quantized(torch.tensor([[1000.0, 1.03, -1000.0]]), Inputs("e4m3"), 0.5)
    assert found.tolist() == [[224.0, 1.0, -224.0]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def test_reference_of_a_checkpoint_that_quantizes_inputs(folder: Path) -> None:
    path = build_weights("fp8_qwen3", folder)
    spec = ModelSpec.read(str(path))
    assert spec.dtype == "bfloat16" and spec.architecture == "Qwen3ForCausalLM"
    stored = load_file(path / "model.safetensors")
    reference = reference_of(path, "cpu")
    ids = torch.randint(0, spec.vocab_size, (48,), generator=torch.Generator().manual_seed(0))
    exact, rounded = reference.states(ids), reference.states(ids, torch.bfloat16)
    assert all(found.good for found in judge(rounded, exact, rounded))
    # Inputs that stay as they are make other states, by more than bfloat16 does.
    plain = Reference(path / "reference")
    wider = plain.states(ids)
    bf16 = relative(plain.states(ids, torch.bfloat16)["5"], wider["5"])
    assert relative(wider["5"], exact["5"]) > 2 * bf16
    # One matrix of one layer, each of its blocks with its neighbour's scale.
    scale = stored["model.layers.2.mlp.down_proj.weight_scale_inv"]
    weight = reference._model(torch.float32).model.layers[2].mlp.down_proj.weight
    with torch.no_grad():
        weight *= (scale.roll(1, 0) / scale).repeat_interleave(128, 0).repeat_interleave(128, 1)
    wrong = {found.name: found.good for found in judge(reference.states(ids), exact, rounded)}
    assert wrong["1"] and not wrong["2"]


def test_static_input_scales_are_the_checkpoints(folder: Path) -> None:
    path = build_weights("fp8_tensor_qwen3", folder)
    stored = load_file(path / "model.safetensors")
    scales = Inputs(**json.loads((path / "reference" / INPUTS).read_text())).scales
    assert scales.keys() == {
        key for key, t in stored.items() if t.dtype == torch.float8_e4m3fn
    } and len(scales) == len(list(filter(is_quantized, stored)))
    for name, scale in scales.items():
        assert stored[name.replace("weight", "input_scale")] == scale
    assert len(set(scales.values())) > 4


def test_plain_weights_have_a_plain_reference(folder: Path) -> None:
    path = build_weights("awq_qwen3", folder)
    assert type(reference_of(path, "cpu")) is Reference
    config = json.loads((path / "reference/config.json").read_text())
    assert "quantization_config" not in config


def test_an_input_left_as_it_is_does_not_pass(folder: Path) -> None:
    reference = reference_of(build_weights("fp8_qwen3", folder), "cpu")
    mlp = reference._model(torch.float32).model.layers[3].mlp
    mlp.forward = lambda hidden: hidden @ mlp.up_proj.weight.T @ mlp.down_proj.weight.T
    with pytest.raises(AssertionError, match=r"layers\.3\.mlp\.down_proj"):
        reference.states(torch.arange(4))
