"""The readers that SpecForge, speculators and Model-Optimizer publish, on files that we wrote from
SmolLM2: what they hand their trainers is what our own reader gives, bit for bit.

Each reader runs in the environment that tests/peers/setup.sh makes. Without one a test says NOT RUN;
with EXTRACTOR_PEERS=1, under which tests/run.sh makes them, it fails.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from extractor.dataset import HiddenStates, Item
from extractor.verbs.convert import convert
from tests.support.models import build, cache_folder

ROOT = Path(__file__).resolve().parents[2]
PEERS = Path(os.environ.get("EXTRACTOR_PEERS_DIR", ROOT / ".peers"))
LENGTHS = (40, 3, 77, 21, 58)
AUX, HIDDEN = ("1", "14", "26"), 576
DRAFT_VOCAB = 100  # of 135 supervised tokens, most of which occur once: who is in, ties decide

pytestmark = pytest.mark.slow


def extract(output: Path, model: Path, *flags: str) -> None:
    rows = output.parent / "rows.jsonl"
    generator = torch.Generator().manual_seed(0)
    lines = [
        json.dumps(
            {
                "id": f"row {i}",
                "input_ids": torch.randint(1000, 40_000, (n,), generator=generator).tolist(),
                "loss_mask": [0] * (n // 3) + [1] * (n - n // 3),
            }
        )
        for i, n in enumerate(LENGTHS)
    ]
    rows.write_text("\n".join(lines) + "\n")
    command = [sys.executable, "launch/extract.py", "--model", str(model), "--data", str(rows)]
    command += ["--output", str(output), "--device", "cpu", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return build("smollm2", cache_folder())


@pytest.fixture(scope="session")
def native(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Path:
    """SmolLM2's states: EAGLE-3's three, the last layer before its norm, and after it."""
    output = tmp_path_factory.mktemp("smollm2") / "out"
    layers = ("--layers", ",".join((*AUX, "29")))
    extract(output, smollm2, *layers, "--draft-vocab-size", str(DRAFT_VOCAB))
    return output


def read(peer: str, folder: Path, kind: str = "-", what: str = "read") -> dict[str, torch.Tensor]:
    """Run a reader in its environment; the tensors that it dumped."""
    python = PEERS / peer / "bin" / "python"
    if not (PEERS / peer / "ready").is_file():
        message = f"NOT RUN: no environment of {peer}: EXTRACTOR_PEERS=1 bash tests/run.sh"
        if os.environ.get("EXTRACTOR_PEERS") == "1":
            pytest.fail(message)
        pytest.skip(message)
    dump = folder.parent / f"{folder.name}-{kind}.dump"
    script = Path(__file__).with_name(f"{what}_{peer}.py")
    done = subprocess.run(
        [str(python), str(script), str(folder), kind, str(dump)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return load_file(dump)


def converted(native: Path, tmp_path: Path, layout: str, *flags: str) -> Path:
    folder = tmp_path / layout
    argv = [str(native), str(folder), "--layout", layout, "--layers", ",".join(AUX), *flags]
    assert convert(argv) == 0
    return folder


def items(native: Path) -> list[Item]:
    data = HiddenStates(native, {"aux": AUX, "last": ("29",), "final": ("final",)})
    assert data.lengths.tolist() == list(LENGTHS)
    return [data[i] for i in range(len(data))]


def check(seen: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    seen = seen.squeeze(0) if seen.dim() == wanted.dim() + 1 else seen
    assert torch.equal(seen[: len(wanted)], wanted.to(seen.dtype)), what
    assert bool((seen[len(wanted) :] == 0).all()), f"{what}: padding"


def test_specforge_eagle3(native: Path, tmp_path: Path):
    seen = read("specforge", converted(native, tmp_path, "specforge"), "eagle3")
    for i, item in enumerate(items(native)):
        mask = item["loss_mask"].clone()
        mask[-1] = 0  # its own: the last token has no next one
        check(seen[f"{i}.input_ids"], item["input_ids"], f"{i} ids")
        check(seen[f"{i}.loss_mask"], mask, f"{i} mask")
        check(seen[f"{i}.hidden_state"], item["aux"], f"{i} aux")
        check(seen[f"{i}.target"], item["final"], f"{i} target")


@pytest.mark.parametrize("strategy", ["dflash", "domino", "dspark"])
def test_specforge_dflash_and_its_kin(native: Path, tmp_path: Path, strategy: str):
    layout = "specforge-dspark" if strategy == "dspark" else "specforge-dflash"
    seen = read("specforge", converted(native, tmp_path, layout), strategy)
    for i, item in enumerate(items(native)):
        check(seen[f"{i}.input_ids"], item["input_ids"], f"{i} ids")
        check(seen[f"{i}.loss_mask"], item["loss_mask"], f"{i} mask")
        check(seen[f"{i}.hidden_states"], item["aux"], f"{i} states")
        if strategy == "dspark":
            check(seen[f"{i}.target_last_hidden_states"], item["final"], f"{i} last")


def test_speculators(native: Path, smollm2: Path, tmp_path: Path):
    """A folder that a run wrote in this layout: here the last layer's own state is captured without
    having been asked for."""
    folder = tmp_path / "out"
    extract(folder, smollm2, "--layers", ",".join(AUX), "--layout", "speculators")
    seen = read("speculators", folder, "file")
    truth = items(native)
    for i, item in enumerate(truth):
        check(seen[f"{i}.input_ids"], item["input_ids"], f"{i} ids")
        check(seen[f"{i}.loss_mask"], item["loss_mask"], f"{i} mask")
        check(seen[f"{i}.hidden_states"], item["aux"], f"{i} states")
        check(seen[f"{i}.verifier_last_hidden_states"], item["last"], f"{i} last, before the norm")
    # Its collator packs the samples, each shifted by one: ids and masks lead, states follow.
    joined = torch.cat([item["aux"][:-1] for item in truth])
    check(seen["batch.hidden_states"][0], joined, "packed states")
    check(seen["batch.input_ids"][0], torch.cat([i["input_ids"][1:] for i in truth]), "packed ids")


def test_speculators_float8(native: Path, tmp_path: Path):
    folder = converted(native, tmp_path, "speculators", "--dtype", "float8_e4m3fn")
    seen = read("speculators", folder, "fp8")
    for i, item in enumerate(items(native)):
        wanted = torch.cat([item["aux"], item["last"]], dim=-1).float()
        got = torch.cat([seen[f"{i}.hidden_states"], seen[f"{i}.verifier_last_hidden_states"]], -1)
        step = wanted.abs().amax(dim=-1, keepdim=True) / 448 * 2**-9
        # Half a step of e4m3, and bfloat16's rounding of value and scale in its own reader.
        assert bool(((got.float() - wanted).abs() <= wanted.abs() * (1 / 16 + 1 / 64) + step).all())


def test_modelopt(native: Path, tmp_path: Path):
    seen = read("modelopt", converted(native, tmp_path, "modelopt"))
    for i, item in enumerate(items(native)):
        for prefix, at in ((f"{i}.", slice(None)), ("batch.", i)):
            check(seen[f"{prefix}input_ids"][at], item["input_ids"], f"{i} ids")
            check(seen[f"{prefix}loss_mask"][at], item["loss_mask"], f"{i} mask")
            check(seen[f"{prefix}aux_hidden_states"][at], item["aux"], f"{i} aux")
            check(seen[f"{prefix}base_model_hidden_states"][at], item["final"], f"{i} final")


@pytest.mark.parametrize("peer", ["specforge", "speculators"])
def test_draft_vocabulary(native: Path, tmp_path: Path, peer: str):
    """What its trainer loads is what it would have derived from the same samples by itself."""
    seen = read(peer, converted(native, tmp_path, peer), str(DRAFT_VOCAB), "vocab")
    for key in ("d2t", "t2d"):
        assert torch.equal(seen[f"loaded.{key}"], seen[f"derived.{key}"]), key
    assert len(seen["loaded.d2t"]) == int(seen["loaded.t2d"].sum()) == DRAFT_VOCAB


@pytest.mark.parametrize("layout", ["specforge", "modelopt", "speculators"])
def test_there_and_back(native: Path, tmp_path: Path, layout: str):
    """Bit for bit, on real states: what a layout keeps comes back as it was."""
    convert([str(native), str(tmp_path / "new"), "--layout", layout])
    convert([str(tmp_path / "new"), str(tmp_path / "back")])
    before, after = HiddenStates(native), HiddenStates(tmp_path / "back")
    kept = set(after.states) & set(before.states)
    assert len(kept) >= len(AUX) + 1
    for i in range(len(before)):
        for key in (*kept, "input_ids", "loss_mask"):
            assert torch.equal(before[i][key], after[i][key]), (i, key)
