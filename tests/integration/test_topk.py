"""Top-k logits of the real engine against transformers' log_softmax: heads tied and not, soft-capped,
and a vocabulary that SGLang pads, by one rank and by two."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from extractor.dataset import HiddenStates
from tests.support.launch import extract, torchrun
from tests.support.topk_judge import LIMIT, complaints


def topk(model: Path, ranks: int, k: int) -> Any:
    result = torchrun(ranks, "-m", "tests.support.topk_worker", str(model), str(k))
    lines = [line for line in result.lines if line.startswith("TOPK ")]
    assert len(lines) == 1, result.text[-3000:]
    return json.loads(lines[0][5:])


@pytest.mark.parametrize(
    ("name", "ranks", "k"),
    [
        # test_program has this one by default.
        pytest.param("tiny_qwen3", 2, 16, marks=pytest.mark.slow),
        pytest.param("tiny_qwen3", 1, 16, marks=pytest.mark.slow),
        ("tiny_softcap", 2, 16),
        pytest.param("tiny_softcap", 1, 16, marks=pytest.mark.slow),
        # More than a rank has, and all there are: no padding among them.
        pytest.param("tiny_vocab100", 2, 100, marks=pytest.mark.slow),
        pytest.param("tiny_vocab100", 1, 70, marks=pytest.mark.slow),
    ],
)
def test_engine(build_model: Callable[[str], Path], name: str, ranks: int, k: int) -> None:
    assert not (wrong := complaints(topk(build_model(name), ranks, k), k)), wrong


def rows(path: Path) -> Path:
    generator = torch.Generator().manual_seed(1)
    lines = [
        json.dumps({"id": f"r{n}", "input_ids": ids, "loss_mask": [1] * n})
        for n in (9, 1, 33)
        for ids in [torch.randint(0, 49_000, (n,), generator=generator).tolist()]
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_program(build_model: Callable[[str], Path], tmp_path: Path) -> None:
    """The command line on two ranks, without the final state; another K is another run."""
    model, output = build_model("tiny_qwen3"), tmp_path / "out"
    data = rows(tmp_path / "rows.jsonl")
    flags = ("--topk-logits", "8", "--no-final", "--layers", "1,4")
    first = extract(model, data, output, *flags, ranks=2)
    assert first.code == 0, first.text
    run = json.loads((output / "run.json").read_text())
    assert run["topk_logits"] == 8 and run["parts"]["topk_logits"] == "8"
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    dataset = HiddenStates(output)
    assert dataset.lengths.tolist() == [9, 1, 33]
    limit = LIMIT[run["engine"]["compute_dtype"]]
    for item in (dataset[i] for i in range(3)):
        assert "hidden_states.final" not in item
        with torch.no_grad():
            logits = reference(input_ids=item["input_ids"].unsqueeze(0)).logits[0].float()
        best = logits.log_softmax(-1).topk(8, dim=-1).values
        assert float((item["topk_logprobs"] - best).abs().max()) <= limit
    again = extract(model, data, output, "--topk-logits", "4", *flags[2:], ranks=2)
    assert again.worker_code == 2
    assert any("topk_logits: 8 then, 4 now" in line for line in again.complaints), again.text
