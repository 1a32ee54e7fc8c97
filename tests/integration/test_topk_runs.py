"""Top-k logits through the whole program with the fake engine: files, resume, check, dry run,
convert."""

import json

import pytest
import torch

from extractor.config import ExtractConfig, parse
from extractor.dataset import HiddenStates, Pad
from extractor.plan.dry_run import make_estimate
from extractor.verbs import check
from extractor.verbs.convert import convert
from extractor.verbs.report import report
from tests.integration.conftest import Bench
from tests.support import folder
from tests.support.fake_engine import expected, expected_topk

K = "--topk-logits=5"


@pytest.mark.parametrize("flags, ranks", [((), 1), (("--no-final", "--tp=1"), 2)])
def test_in_every_file(bench: Bench, flags: tuple[str, ...], ranks: int) -> None:
    assert bench.run(K, *flags, ranks=ranks).code == 0
    data = HiddenStates(bench.output)
    assert len(data) == 40
    for item in (data[i] for i in range(len(data))):
        for key, value in expected_topk(item["input_ids"], 5).items():
            assert item[key].dtype == value.dtype and torch.equal(item[key], value)
        assert torch.equal(item["hidden_states.2"], expected(item["input_ids"], "2"))
        assert ("hidden_states.final" in item) is (not flags)
    batch = Pad()([data[0], data[1]])
    longest = max(data.lengths[:2])
    assert batch["topk_ids"].shape == batch["topk_logprobs"].shape == (2, longest, 5)
    assert "topk_ids" not in HiddenStates(bench.output, topk=False)[0]
    assert HiddenStates(bench.output, dtype=torch.bfloat16)[0]["topk_logprobs"].dtype.itemsize == 4
    assert check.examine(bench.output, deep=True).complete
    assert report([str(bench.output), "--states-of", "4"]) == 0
    assert "topk_logprobs" in (bench.output / "report.html").read_text()


def test_without_it_nothing_is_there(bench: Bench) -> None:
    assert bench.run().code == 0
    assert not [key for key in HiddenStates(bench.output)[0] if key.startswith("topk")]
    assert "topk_logits" not in json.loads((bench.output / "run.json").read_text())["parts"]


def test_another_k_is_another_run(bench: Bench) -> None:
    assert bench.run(K).code == 0
    assert "40 done, 0 to do" in bench.run(K).output(0)
    for flag, now in (("--topk-logits=6", "6"), ("--topk-logits=0", "absent")):
        run = bench.run(flag)
        assert run.code != 0 and f"topk_logits: 5 then, {now} now" in run.output(0)


def test_layouts_that_read_none_refuse_it(bench: Bench) -> None:
    for name in ("specforge", "speculators", "modelopt"):
        run = bench.run(K, f"--layout={name}")
        assert run.code != 0
        assert "reads no logits; use --layout native (docs/formats.md)" in run.output(0)


def test_deep_check_sees_damage(bench: Bench) -> None:
    assert bench.run(K).code == 0
    path = folder.samples(bench.output)[3]
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    at = 8 + length + header["topk_logprobs"]["data_offsets"][0]
    content[at : at + 4] = b"\x00\x00\xc0\x7f"
    path.write_bytes(content)
    bad = check.examine(bench.output, deep=True).bad
    assert list(bad.values()) == ["topk_logprobs has a value that is not finite"]


def test_dry_run_counts_its_bytes(bench: Bench) -> None:
    def estimate(*flags: str):
        argv = bench.argv("--dry-run", "--device=cpu", *flags)
        return make_estimate(parse(ExtractConfig, argv, "extract"))

    plain, more = estimate(), estimate("--topk-logits=64")
    assert bench.run("--topk-logits=64").code == 0
    files = [*folder.samples(bench.output).values(), *(bench.output / "vocab").iterdir()]
    used = sum(path.stat().st_blocks * 512 for path in files)
    assert abs(more.disk / used - 1) < 0.05 and more.disk > plain.disk * 1.3
    assert more.device.logits > 0 and plain.device.logits == 0
    assert [name for name in more.choices if "native" not in name] == []


def test_convert_keeps_or_says(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run(K).code == 0
    small, other = bench.folder / "small", bench.folder / "other"
    assert convert([str(bench.output), str(small), "--dtype", "float8_e4m3fn"]) == 0
    item, before = HiddenStates(small)[7], HiddenStates(bench.output)[7]
    for key in ("topk_logprobs", "topk_ids"):
        assert torch.equal(item[key], before[key])
    assert convert([str(bench.output), str(other), "--layout", "modelopt"]) == 0
    assert "does not keep the top-k logits" in capsys.readouterr().err
    assert "topk_logits" not in json.loads((other / "run.json").read_text())["parts"]
