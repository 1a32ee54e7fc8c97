"""Rows beyond max_position_embeddings, in the context that the rope's scaling gives, and right there."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support import folder
from tests.support.launch import extract
from tests.support.reference import Reference

TRAINED = 64
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED}


@pytest.mark.slow
@pytest.mark.parametrize("rope", [LINEAR, YARN], ids=["linear", "yarn"])
@pytest.mark.parametrize("where", ["config", "flag"])
def test_four_times_as_long(
    build_model: Callable[[str], Path], tmp_path: Path, rope: dict[str, Any], where: str
) -> None:
    plain, model = build_model("tiny_llama"), tmp_path / "model"
    model.mkdir()
    for file in plain.iterdir():
        (model / file.name).symlink_to(file)
    config = json.loads((plain / "config.json").read_text())
    theta = config.pop("rope_parameters")["rope_theta"]
    config |= {"max_position_embeddings": TRAINED, "rope_theta": theta}
    scaled = config | {"rope_scaling": rope}
    (model / "config.json").unlink()
    (model / "config.json").write_text(json.dumps(scaled if where == "config" else config))
    data, output = tmp_path / "rows.jsonl", tmp_path / "out"
    generator = torch.Generator().manual_seed(0)
    with data.open("w") as file:
        for length in (4 * TRAINED, 40, 3 * TRAINED):
            ids = torch.randint(0, 40_000, (length,), generator=generator).tolist()
            file.write(json.dumps({"input_ids": ids, "loss_mask": [1] * length}) + "\n")
    flags = ["--layers", "1,4", "--no-self-check"]
    if where == "flag":
        flags += ["--sglang", "json_model_override_args=" + json.dumps({"rope_scaling": rope})]
    result = extract(model, data, output, *flags)
    assert result.code == 0, result.text
    (model / "config.json").write_text(json.dumps(scaled))
    reference, files = Reference(model), folder.samples(output)
    assert len(files) == 3
    for path in files.values():
        tensors = load_file(path)
        states = {k.partition(".")[2]: v for k, v in tensors.items() if k.startswith("hidden")}
        for judgement in reference.judge(tensors["input_ids"], states):
            assert judgement.good, (path, judgement)


@pytest.mark.slow
def test_a_row_beyond_that_is_refused(build_model: Callable[[str], Path], tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    ids = list(range(5000))  # tiny_llama was made for 4,096
    data.write_text(json.dumps({"input_ids": ids, "loss_mask": [1] * 5000}) + "\n")
    result = extract(build_model("tiny_llama"), data, tmp_path / "out", "--layers", "1,4")
    assert result.worker_code == 2 and "5000" in result.text and "4096" in result.text
