"""A number that is none: the row is left out by name and the run says so with exit code 3; its
neighbours in the batch are whole and right."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration.conftest import STATES, Bench
from tests.support import folder
from tests.support.faults import PROCESSES, Fault
from tests.support.launch import extract
from tests.support.ledger import Injection, Ledger
from tests.support.reference import Reference

POISON = 1234


def poisoned_rows(path: Path, count: int, most: int, vocabulary: int) -> set[int]:
    """Pre-tokenized rows, a third of which hold POISON: at their first, a middle or their last token."""
    generator = torch.Generator().manual_seed(7)
    lines, bad = [], set[int]()
    for row in range(count):
        length = int(torch.randint(4, most, (1,), generator=generator))
        ids = torch.randint(2000, vocabulary, (length,), generator=generator).tolist()
        if row % 3 == 1:
            ids[(0, length // 2, length - 1)[row // 3 % 3]] = POISON
            bad.add(row)
        lines.append(json.dumps({"id": f"r{row}", "input_ids": ids, "loss_mask": [1] * length}))
    path.write_text("\n".join(lines) + "\n")
    return bad


def rejects(output: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (output / "rejects.jsonl").read_text().splitlines()]


def assert_rejected(output: Path, data: Path, bad: set[int], states: set[str]) -> list[int]:
    """Exactly these rows, each named with its id, line, token and state; gives, of each, how many tokens
    before the poisoned one that is."""
    before: list[int] = []
    rows = folder.rows_of(data)
    assert {line["row"] for line in rejects(output)} == bad
    assert set(folder.samples(output)) == set(range(len(rows))) - bad
    for line in rejects(output):
        ids = rows[line["row"]]["input_ids"]
        assert isinstance(ids, list)
        assert (line["reason"], line["id"]) == ("non_finite", f"r{line['row']}")
        assert line["source"].endswith(f"{data.name}:{line['row'] + 1}")
        found = re.match(r"state (\w+) is not finite at token (\d+) of (\d+)", line["detail"])
        assert found and found.group(1) in states and int(found.group(3)) == len(ids)
        before.append(ids.index(POISON) - int(found.group(2)))
    run = json.loads((output / "run.json").read_text())
    assert (run["status"], run["counts"]["rejected_in_run"]) == ("complete", len(bad))
    assert run["counts"]["written"] == len(rows) - len(bad)
    return before


@pytest.mark.parametrize("ranks, tp", [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("by", [[], [PROCESSES]], ids=["threads", "processes"])
def test_a_row_that_is_no_number(
    bench: Bench, ranks: int, tp: int, by: list[Fault], ledger: Ledger
) -> None:
    bad = poisoned_rows(bench.data, 40, 60, 50_000)
    poison = Fault(kind="nan", at=POISON, restart=None)
    flags = (f"--tp={tp}", "--no-self-check")
    run = bench.run(*flags, ranks=ranks, faults=[poison, *by])
    assert run.codes() == {rank: 3 for rank in range(ranks)}, run.output()
    assert set(assert_rejected(bench.output, bench.data, bad, set(STATES))) == {0}
    folder.assert_whole(bench.output, bench.data, STATES)
    before = folder.snapshot(bench.output)
    again = bench.run(*flags, ranks=ranks)
    assert again.codes() == {rank: 3 for rank in range(ranks)}, again.output()
    assert f"{len(bad)} rejected by an earlier run" in again.output(0)
    assert folder.snapshot(bench.output) == before
    assert {line["row"] for line in rejects(bench.output)} == bad
    ledger.add(Injection(group="numbers", fault="states of one token are NaN"))


def test_an_embedding_that_is_no_number(build_model: Callable[[str], Path], tmp_path: Path) -> None:
    """The real program on a checkpoint whose embedding of one token is NaN, all rows in one batch."""
    clean, model = build_model("tiny_qwen3"), tmp_path / "model"
    model.mkdir()
    for file in clean.iterdir():
        (model / file.name).symlink_to(file)
    weights = load_file(clean / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = torch.nan
    (model / "model.safetensors").unlink()
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    data, output = tmp_path / "rows.jsonl", tmp_path / "out"
    bad = poisoned_rows(data, 12, 30, 40_000)
    result = extract(model, data, output, "--layers", "1,4,embed", "--batch-tokens", "4096")
    assert result.worker_code == 3, result.text
    assert "1 batches" in result.text
    # In a layer with attention on a CPU, a sample's earlier tokens meet it too, with a weight of zero.
    assert min(assert_rejected(output, data, bad, {"1", "4", "embed", "final"})) >= 0
    reference = Reference(clean)
    for path in folder.samples(output).values():
        tensors = load_file(path)
        states = {k.partition(".")[2]: v for k, v in tensors.items() if k.startswith("hidden")}
        for judgement in reference.judge(tensors["input_ids"], states):
            assert judgement.good, (path, judgement)
