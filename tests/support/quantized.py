"""Quantized checkpoints in the formats that SGLang reads, written by hand from small random models.

A folder holds the quantized checkpoint, and reference/ in it the same model with its weights
dequantized, for transformers. Both are the same numbers: scales have so few significant bits that each
weight, a number of few bits times its scale, is a bfloat16. Scales (and zero points) are far apart from
one group to the next, so that one group's scale taken for another's is far off.

Where a format also quantizes what its weights are multiplied with, reference/quantized_inputs.json says
how, for tests/support/quantized_reference.py.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

INPUTS = "quantized_inputs.json"
# What is quantized, by the name of its weight in a checkpoint or in transformers' model (whose experts
# are one parameter a layer): the matrices of attention, of MLPs and of experts, not routers and lm_head.
_MATRIX = re.compile(
    r"\.layers\.(\d+)\..*\b(q|k|v|o|q_a|q_b|kv_b|gate|up|down|gate_up)_proj(_with_mqa)?(\.weight)?$"
    r"|\.kv_a_proj_with_mqa\.weight$"
)
FLOAT8_TOP, INT8_TOP = 448.0, 127.0
AWQ_GROUP, INT4_GROUP = 128, 32
# Where the eight columns of an AWQ word are, from its lowest four bits on.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Inputs:
    """How the inputs of quantized layers are quantized.

    Attributes:
        kind: "e4m3" or "int8", both symmetric.
        group: so many neighbouring features share a scale; None: all of a token's.
        scales: by name of the layer's weight, where scales are the checkpoint's and not the token's own.
    """

    kind: str
    group: int | None = None
    scales: dict[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True)
class Scheme:
    """A format.

    Attributes:
        config: quantization_config of config.json.
        pack: from a weight's name and values [out, in] in float32 to the checkpoint's tensors for it and
            the values that these stand for.
        inputs: how its inputs are quantized; None: they are not.
        static: whether the checkpoint has the inputs' scales, one a layer.
    """

    config: dict[str, Any]
    pack: Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
    inputs: Inputs | None = None
    static: bool = False


def is_quantized(name: str) -> bool:
    return _MATRIX.search(name) is not None


def quantize(path: Path, scheme: Scheme) -> None:
    """Make path the quantized checkpoint of the plain one in path/reference, whose weights become the
    dequantized ones."""
    plain = path / "reference"
    torch.manual_seed(1)
    stored: Tensors = {}
    values: Tensors = {}
    scales: dict[str, float] = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if not is_quantized(name):
            stored[name] = values[name] = weight
            continue
        packed, value = scheme.pack(name, weight.float())
        values[name] = value.to(torch.bfloat16)
        assert torch.equal(values[name].float(), value), name
        if scheme.static:
            scales[name] = input_scale(name)
            packed[_beside(name, "input_scale")] = torch.tensor(scales[name])
        stored |= packed
    for folder, tensors in ((path, stored), (plain, values)):
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = scheme.config
    (path / "config.json").write_text(json.dumps(config, indent=1))
    if scheme.inputs is not None:
        inputs = Inputs(scheme.inputs.kind, scheme.inputs.group, scales)
        (plain / INPUTS).write_text(json.dumps(asdict(inputs)))


def input_scale(name: str) -> float:
    """Of a layer's input: layers that are fed the same (q, k and v; gate and up) have the same, others
    another one. Inputs up to 14 are in reach of all."""
    layer, kind = re.findall(r"\.layers\.(\d+)\..*\b(\w+)_proj", name)[0]
    fed_alike = {"q": 0, "k": 0, "v": 0, "o": 1, "gate": 2, "up": 2, "down": 3}[kind]
    return (8 + (3 * int(layer) + fed_alike) % 8) / 8 / 32


# Formats ------------------------------------------------------------------------------------------


def float8_blocks(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """DeepSeek-V3's and Qwen3-FP8's: a scale a block of 128 x 128."""
    number, scale, value = _float8(weight, 128, 128)
    return {name: number, f"{name}_scale_inv": scale}, value


def float8_tensor(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """One scale a matrix."""
    number, scale, value = _float8(weight, *weight.shape)
    return {name: number, f"{name}_scale": scale.reshape(())}, value


def float8_channels(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """One scale an output feature."""
    number, scale, value = _float8(weight, 1, weight.shape[1])
    return {name: number, f"{name}_scale": scale}, value


def int8_channels(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """One scale an output feature; a power of two, since seven bits times one are a bfloat16."""
    blocks = _uneven(_blocks(weight, 1, weight.shape[1]))
    scale = _short(blocks.abs().amax((1, 3), keepdim=True) / INT8_TOP, 1)
    number = (blocks / scale).round()
    stored = {name: _joined(number, weight).to(torch.int8), f"{name}_scale": scale[:, 0, :, 0]}
    return stored, _joined(number * scale, weight)


def awq(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Four bits from a zero point, a scale for AWQ_GROUP input features of an output feature; stored the
    other way round, [in, out], eight output features a word."""
    groups = _uneven(_blocks(weight, 1, AWQ_GROUP))
    groups = groups + groups.std() * _between(-1, 1, groups)
    low, high = groups.amin((1, 3), keepdim=True), groups.amax((1, 3), keepdim=True)
    scale = _short((high.clamp_min(0) - low.clamp_max(0)) / 15, 4)
    zero = (-low.clamp_max(0) / scale).round().clamp(0, 15)
    number = ((groups / scale).round() + zero).clamp(0, 15)
    stored = {
        "qweight": _words(_joined(number, weight).T, AWQ_ORDER),
        "qzeros": _words(zero[:, 0, :, 0].T, AWQ_ORDER),
        "scales": scale[:, 0, :, 0].T.contiguous().to(torch.float16),
    }
    assert torch.equal(stored["scales"].float(), scale[:, 0, :, 0].T)
    value = _joined((number - zero) * scale, weight)
    return {_beside(name, key): tensor for key, tensor in stored.items()}, value


def int4_groups(name: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Four bits around zero, a scale for INT4_GROUP input features of an output feature, as in
    Kimi-K2.5's experts; eight input features a word."""
    groups = _uneven(_blocks(weight, 1, INT4_GROUP))
    scale = _short(groups.abs().amax((1, 3), keepdim=True) / 7, 4)
    number = (groups / scale).round()
    stored = {
        "weight_packed": _words(_joined(number, weight) + 8, range(8)),
        "weight_scale": scale[:, 0, :, 0].to(torch.bfloat16),
        "weight_shape": torch.tensor(weight.shape),
    }
    value = _joined(number * scale, weight)
    return {_beside(name, key): tensor for key, tensor in stored.items()}, value


def _compressed(
    layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None
) -> dict[str, Any]:
    """compressed-tensors: symmetric numbers, and what else its two parts say."""
    group = {
        "targets": ["Linear"],
        "weights": {**weights, "symmetric": True, "dynamic": False},
        "input_activations": inputs and {**inputs, "symmetric": True, "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


def _channels_and_tokens(layout: str, kind: str) -> dict[str, Any]:
    """A scale an output feature for weights, and one a token for inputs."""
    eight = {"num_bits": 8, "type": kind}
    return _compressed(layout, {**eight, "strategy": "channel"}, {**eight, "strategy": "token"})


SCHEMES = {
    "fp8": Scheme(
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
        },
        float8_blocks,
        Inputs("e4m3", 128),
    ),
    "fp8_tensor": Scheme(
        {"quant_method": "fp8", "activation_scheme": "static"},
        float8_tensor,
        Inputs("e4m3"),
        static=True,
    ),
    "ct_fp8": Scheme(
        _channels_and_tokens("float-quantized", "float"), float8_channels, Inputs("e4m3")
    ),
    "ct_int8": Scheme(_channels_and_tokens("int-quantized", "int"), int8_channels, Inputs("int8")),
    "ct_int4": Scheme(
        _compressed(
            "pack-quantized",
            {"num_bits": 4, "type": "int", "strategy": "group", "group_size": INT4_GROUP},
            None,
        ),
        int4_groups,
    ),
    "awq": Scheme(
        {
            "quant_method": "awq",
            "version": "gemm",
            "bits": 4,
            "group_size": AWQ_GROUP,
            "zero_point": True,
            "modules_to_not_convert": None,
        },
        awq,
    ),
}


# Numbers and scales -------------------------------------------------------------------------------


def _float8(
    weight: torch.Tensor, rows: int, columns: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers like weight, a scale a block [out / rows, in / columns], and what they stand for."""
    blocks = _uneven(_blocks(weight, rows, columns))
    scale = _short(blocks.abs().amax((1, 3), keepdim=True) / FLOAT8_TOP, 4)
    number = (blocks / scale).to(torch.float8_e4m3fn)
    value = number.float() * scale
    return _joined(number, weight), scale[:, 0, :, 0].contiguous(), _joined(value, weight)


def _blocks(weight: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[out, in] as [blocks, rows, blocks, columns], with zeros where the last ones are not full."""
    out, width = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -width % columns, 0, -out % rows))
    return padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))


def _joined(blocks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    whole = blocks.flatten(2, 3).flatten(0, 1)
    return whole[: like.shape[0], : like.shape[1]].contiguous()


def _uneven(blocks: torch.Tensor) -> torch.Tensor:
    """Each block times a factor of its own, from a half to two."""
    return blocks * torch.exp2(_between(-1, 1, blocks))


def _between(low: float, high: float, blocks: torch.Tensor) -> torch.Tensor:
    """A random number a block."""
    return torch.empty(blocks.shape[0], 1, blocks.shape[2], 1).uniform_(low, high)


def _short(scale: torch.Tensor, bits: int) -> torch.Tensor:
    """The next larger numbers of so many significant bits."""
    mantissa, exponent = torch.frexp(scale)
    return torch.ldexp((mantissa * 2**bits).ceil() / 2**bits, exponent)


def _words(numbers: torch.Tensor, order: Sequence[int]) -> torch.Tensor:
    """Numbers below 16 [rows, columns], eight columns of a row in each int32, in that order from its
    lowest four bits on."""
    eights = numbers.to(torch.int64).unflatten(1, (-1, 8))[..., list(order)]
    words = (eights << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _beside(weight: str, key: str) -> str:
    return f"{weight.removesuffix('.weight')}.{key}"
