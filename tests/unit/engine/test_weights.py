"""Every parameter filled, every tensor read: seen on a small model with a loader like SGLang's."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from extractor.engine.weights import WeightAudit
from extractor.errors import RunError

H = 8
Tensors = dict[str, torch.Tensor]


class Model(nn.Module):
    """Two layers whose q and k are fused, a norm of ones, and integers of a quantized matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.norm = nn.Parameter(torch.ones(H))
        self.model.layers = nn.ModuleList([nn.Module(), nn.Module()])
        for layer in self.model.layers:
            layer.qk = nn.Parameter(torch.empty(2 * H, H, dtype=torch.bfloat16))
            layer.packed = nn.Parameter(torch.empty(H, H, dtype=torch.int32), requires_grad=False)
            layer.k_scale = nn.Parameter(torch.ones(()), requires_grad=False)
        self.lm_head = nn.Parameter(torch.empty(H, H))

    def load_weights(self, weights: Any) -> None:
        for name, tensor in weights:
            parameters = dict(self.named_parameters())
            if ".q." in name or ".k." in name:
                fused = parameters[name.replace(".q.", ".").replace(".k.", ".")]
                begin = 0 if ".q." in name else H
                fused.data[begin : begin + H].copy_(tensor)
            elif name in parameters:
                assert tensor.shape == parameters[name].shape
                parameters[name].data.copy_(tensor.to(parameters[name].dtype))


def checkpoint() -> Tensors:
    tensors: Tensors = {"model.norm": torch.rand(H), "lm_head": torch.rand(H, H)}
    for k in range(2):
        for part in "qk":
            tensors[f"model.layers.{k}.{part}.qk"] = torch.randn(H, H)
        tensors[f"model.layers.{k}.packed"] = torch.randint(0, 1 << 20, (H, H), dtype=torch.int32)
    return tensors


def audit_of(tensors: Tensors, model: Model | None = None) -> WeightAudit:
    model, audit = model or Model(), WeightAudit()
    audit.load(model, model.load_weights, iter(tensors.items()))
    return audit


def settle(audit: WeightAudit, head: bool = False) -> str:
    return audit.settle("model.", 2, head, "Model", 1)


def test_a_whole_checkpoint_is_loaded_as_it_is() -> None:
    tensors, model = checkpoint(), Model()
    audit = audit_of(tensors, model)
    assert settle(audit) == "all parameters filled; 8 of 8 tensors read"
    assert torch.equal(model.model.norm.data, tensors["model.norm"])
    assert torch.equal(model.model.layers[1].packed.data, tensors["model.layers.1.packed"])
    assert float(model.model.layers[0].k_scale) == 1.0  # as it was made: it may be left out


@pytest.mark.parametrize(
    "name", ["model.norm", "model.layers.1.q.qk", "model.layers.0.k.qk", "model.layers.1.packed"]
)
def test_what_no_tensor_fills_is_named(name: str) -> None:
    tensors = checkpoint()
    del tensors[name]
    with pytest.raises(RunError, match="filled by no tensor") as raised:
        settle(audit_of(tensors))
    assert name.replace(".q.", ".").replace(".k.", ".") in str(raised.value)


def test_one_row_that_is_missing_counts() -> None:
    model, audit = Model(), WeightAudit()

    def load(weights: Iterator[Any]) -> None:
        tensors = dict(weights)
        tensors["model.layers.1.q.qk"] = tensors["model.layers.1.q.qk"][: H - 1]
        for name, tensor in tensors.items():
            fused = dict(model.named_parameters())[name.replace(".q.", ".").replace(".k.", ".")]
            begin = H if ".k." in name else 0
            fused.data[begin : begin + len(tensor)].copy_(tensor)

    audit.load(model, load, iter(checkpoint().items()))
    assert [n for n in audit.unfilled if not n.endswith("_scale")] == ["model.layers.1.qk"]


def test_a_nan_of_the_checkpoint_is_no_gap() -> None:
    tensors = checkpoint()
    tensors["model.norm"][3] = torch.nan
    tensors["model.layers.0.q.qk"][:] = torch.nan
    settle(audit_of(tensors))


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.bias", "model.layers.1.extra.weight", "model.second_norm.weight"]
)
def test_what_nobody_reads_is_named(name: str) -> None:
    with pytest.raises(RunError, match=f"read by nothing.*{name}"):
        settle(audit_of(checkpoint() | {name: torch.ones(H)}))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.2.mlp.weight",  # a layer past the last one
        "mtp.layers.0.weight",
        "vision_tower.layers.0.weight",
        "lm_head.bias",
    ],
)
def test_what_need_not_be_read_passes(name: str) -> None:
    assert "8 of 9" in settle(audit_of(checkpoint() | {name: torch.ones(H)}))


def test_a_bias_of_zeros_need_not_be_read() -> None:
    settle(audit_of(checkpoint() | {"model.layers.0.o.bias": torch.zeros(H)}))


def test_the_head_counts_where_logits_are_asked_for() -> None:
    tensors = checkpoint()
    del tensors["lm_head"]
    settle(audit_of(tensors))
    with pytest.raises(RunError, match="lm_head"):
        settle(audit_of(tensors), head=True)


def test_padding_of_a_quantized_layer_is_zero_and_no_gap() -> None:
    model, audit = Model(), WeightAudit()
    model.quant_config = object()

    def load(weights: Iterator[Any]) -> None:
        tensors = dict(weights)
        for name, parameter in model.named_parameters():
            if name.endswith("qk"):  # three rows are padding
                parameter.data[: 2 * H - 3].copy_(torch.ones(2 * H - 3, H))
            elif name in tensors:
                parameter.data.copy_(tensors[name])

    audit.load(model, load, iter(checkpoint().items()))
    assert not [name for name in audit.unfilled if name.endswith("qk")]
    assert not bool(model.model.layers[0].qk.data[2 * H - 3 :].any())


def test_other_loaders_are_not_judged() -> None:
    assert settle(WeightAudit()).startswith("not checked")
