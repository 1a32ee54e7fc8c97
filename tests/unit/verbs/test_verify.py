"""`verify` on SmolLM2's own states: right ones pass; wrong ones fail, and it says what they are."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from extractor.errors import UsageError
from extractor.files import write_whole
from extractor.layouts.base import sample_path
from extractor.layouts.native import native_metadata
from extractor.layouts.planes import Blob
from extractor.layouts.safetensors import safetensors_header
from extractor.output import run_json
from extractor.output.journal import Journal
from extractor.output.run_json import Run, RunModel
from extractor.records import IDS, LOGPROBS, Sample
from extractor.verbs.reference import FEW, Tensors, judge
from extractor.verbs.verify import verify
from tests.support.reference import Reference

TEXTS = (
    "The lighthouse keeper counted the ships twice, once at dusk and once before the fog came in.",
    "A matrix times its inverse is the identity, unless rounding has something to say about it.",
)
NAMES = ("14", "embed", "3", "29", "final")
Edit = Callable[[Tensors], Tensors]


@pytest.fixture(scope="module")
def model(build_model: Callable[[str], Path]) -> Path:
    return build_model("smollm2")


@pytest.fixture(scope="module")
def written(model: Path) -> list[tuple[Sample, Tensors]]:
    """SmolLM2's bfloat16 states of two texts."""
    reference, tokenizer = Reference(model), AutoTokenizer.from_pretrained(model)
    found: list[tuple[Sample, Tensors]] = []
    for row, text in enumerate(TEXTS):
        ids = torch.tensor(tokenizer(text).input_ids)
        sample = Sample(
            row=row,
            turn=0,
            id=str(row),
            source="",
            input_ids=ids,
            loss_mask=torch.ones(len(ids), dtype=torch.uint8),
        )
        states = reference.states(ids, torch.bfloat16)
        found.append((sample, {name: states[name].bfloat16() for name in NAMES}))
    return found


def folder(
    path: Path,
    model: Path,
    written: list[tuple[Sample, Tensors]],
    edit: Edit = dict,
    other: Edit = dict,
) -> Path:
    """An output folder of these samples; row 1 went through edit first, row 0 through other."""
    journal = Journal(path / "journal/0000.jsonl")
    for sample, states in written:
        kept = edit(states) if sample.row == 1 else other(states)
        tensors = {"input_ids": sample.input_ids, "loss_mask": sample.loss_mask}
        topk = {name: kept[name] for name in (LOGPROBS, IDS) if name in kept}
        tensors |= {f"hidden_states.{n}": kept[n].contiguous() for n in kept if n not in topk}
        tensors |= topk
        blobs = {name: Blob.of(tensor) for name, tensor in tensors.items()}
        header = safetensors_header(blobs, native_metadata(sample, "smollm2", ",".join(NAMES)))
        file = path / sample_path(sample.row, 0)
        parts = [header, *(blob.data for blob in blobs.values())]
        journal.finished(sample, write_whole(file, parts, sync=False))
    journal.close()
    shape = RunModel(path=str(model), num_layers=30, hidden_size=576, vocab_size=49152)
    topk = edit(written[1][1]).get(IDS) if written else None
    run = Run(
        fingerprint="0",
        layers=NAMES,
        dtype="bfloat16",
        model=shape,
        topk_logits=0 if topk is None else topk.shape[1],
    )
    run_json.write(path / run_json.RUN, run)
    return path


def verdicts(text: str) -> dict[tuple[str, str], str]:
    """(sample, state) to what the table says of it."""
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    return {(line[0], line[1]): line[-1] for line in lines if re.fullmatch(r"\d{9}", line[0])}


def swapped(x: Tensors) -> Tensors:
    return x | {"3": x["14"], "14": x["3"]}


CASES: dict[str, tuple[Edit, dict[str, str]]] = {
    "layers swapped": (
        swapped,
        {"3": "WRONG: it is state 14", "14": "WRONG: it is state 3"},
    ),
    "a row late": (
        lambda x: x | {"14": x["14"].roll(1, 0)},
        {"14": "WRONG: it is this state one row late"},
    ),
    "a row early": (
        lambda x: x | {"14": x["14"].roll(-1, 0)},
        {"14": "WRONG: it is this state one row early"},
    ),
    "half": (lambda x: x | {"14": x["14"] / 2}, {"14": "WRONG: it is this state times 0.50"}),
    "before the norm": (lambda x: x | {"final": x["29"]}, {"final": "WRONG: it is state 29"}),
    "after the norm": (lambda x: x | {"29": x["final"]}, {"29": "WRONG: it is state final"}),
    "noise": (
        lambda x: x | {"3": x["3"] + torch.randn_like(x["3"]) * x["3"].std()},
        {"3": "WRONG: too far from the reference"},
    ),
    "not a number": (
        lambda x: x | {"3": x["3"] * float("nan")},
        {"3": "WRONG: too far from the reference"},
    ),
}


def test_untouched_states_pass(
    tmp_path: Path, model: Path, written: list[tuple[Sample, Tensors]], capsys: Any
) -> None:
    assert verify([str(folder(tmp_path, model, written))]) == 0
    text = capsys.readouterr().out
    assert "10 of 10 states of 2 samples are right" in text
    assert set(verdicts(text).values()) == {"ok"}


@pytest.mark.parametrize("case", CASES)
def test_wrong_states_fail_by_name(
    tmp_path: Path, model: Path, written: list[tuple[Sample, Tensors]], capsys: Any, case: str
) -> None:
    edit, wrong = CASES[case]
    assert verify([str(folder(tmp_path, model, written, edit))]) == 1
    text = capsys.readouterr().out
    found = verdicts(text)
    assert f"{10 - len(wrong)} of 10 states of 2 samples are right" in text
    for (sample, state), verdict in found.items():
        expected = wrong.get(state, "ok") if sample.endswith("1") else "ok"
        assert verdict == expected, (sample, state)


@pytest.mark.parametrize("tokens", [1, 2, FEW])
def test_a_short_sample_of_states_that_rounding_cannot_tell_apart(tokens: int) -> None:
    """A first token whose activation is so large that a layer adds less to it than bfloat16 rounds off;
    a layer that can be told is told."""
    want, other = torch.zeros(tokens, 64), torch.zeros(tokens, 64)
    want[:, 0] = 1000.0
    other[:, 0] = 500.0
    next_layer, rounded = want.clone(), want.clone()
    next_layer[:, 1], rounded[:, 2] = 3.0, 4.0
    exact = {"1": want, "2": next_layer, "3": other}
    between = want.clone()
    between[:, 1] = 2.0
    (near,) = judge({"1": between}, exact, {"1": rounded})
    assert near.good == (tokens < FEW)
    (wrong,) = judge({"1": other}, exact, {"1": rounded})
    assert not wrong.good and wrong.nearest == "3"


def with_topk(model: Path, x: Tensors, shift: int, off: int, k: int = 6) -> Tensors:
    """Top-k logits out of the final state, as bfloat16 lm_head makes them; moved by rows or ids."""
    head = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).lm_head
    with torch.no_grad():
        best = head(x["final"].bfloat16()).float().log_softmax(-1).topk(k, dim=-1)
    moved = {IDS: best.indices.roll(shift, 0).int() + off, LOGPROBS: best.values.roll(shift, 0)}
    return x | moved


@pytest.mark.parametrize(
    "shift, off, verdict",
    [
        (0, 0, "ok"),
        (1, 0, "WRONG: it is this state one row late"),
        (-1, 0, "WRONG: it is this state one row early"),
        (0, 7, "WRONG: too far from the reference"),
    ],
)
def test_topk(
    tmp_path: Path,
    model: Path,
    written: list[tuple[Sample, Tensors]],
    capsys: Any,
    shift: int,
    off: int,
    verdict: str,
) -> None:
    output = folder(
        tmp_path,
        model,
        written,
        lambda x: with_topk(model, x, shift, off),
        lambda x: with_topk(model, x, 0, 0),
    )
    code = verify([str(output)])
    found = verdicts(capsys.readouterr().out)
    assert found.pop(("000000001", "topk")) == verdict
    assert code == (verdict != "ok") and set(found.values()) == {"ok"}


def test_a_folder_without_samples_is_refused(tmp_path: Path, model: Path) -> None:
    with pytest.raises(UsageError, match="no finished samples"):
        verify([str(folder(tmp_path, model, []))])


@pytest.mark.parametrize("damage", ["cut", "another size", "an unknown class"])
def test_a_damaged_model_is_one_line(
    tmp_path: Path, model: Path, written: list[tuple[Sample, Tensors]], damage: str
) -> None:
    other = Path(shutil.copytree(model, tmp_path / "model"))
    config = json.loads((other / "config.json").read_text())
    if damage == "cut":
        weights = other / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:5000])
    elif damage == "another size":
        (other / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    else:
        (other / "config.json").write_text(json.dumps(config | {"model_type": "no_such"}))
    with pytest.raises(UsageError, match=r"cannot be compared|layers of width"):
        verify([str(folder(tmp_path / "out", model, written)), "--model", str(other)])
