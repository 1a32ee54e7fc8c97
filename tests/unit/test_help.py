"""`--help` of every verb: 80 columns, and a word on each flag."""

import dataclasses
import re

import pytest

from extractor.cli import VERBS
from extractor.config import ExtractConfig, PrepareConfig, ShowConfig, parse
from extractor.verbs.check import CheckConfig
from extractor.verbs.convert import ConvertConfig
from extractor.verbs.report import ReportConfig
from extractor.verbs.verify import VerifyConfig

KINDS = {
    "extract": ExtractConfig,
    "prepare": PrepareConfig,
    "show": ShowConfig,
    "check": CheckConfig,
    "verify": VerifyConfig,
    "convert": ConvertConfig,
    "report": ReportConfig,
}
BORDER = re.compile(r"[\u2500-\u257f]")


@pytest.mark.parametrize("verb", VERBS)
def test_help(verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as end:
        parse(KINDS[verb], ["--help"], f"extractor {verb}")
    text = capsys.readouterr().out
    assert end.value.code == 0
    assert max(map(len, text.splitlines())) <= 80
    assert f"extractor {verb}" in text.splitlines()[0]
    said = " ".join(BORDER.sub(" ", text).split())
    for field in dataclasses.fields(KINDS[verb]):
        flag = "--" + field.name.replace("_", "-")
        if f" {flag}" not in said:  # a folder or file, by its place
            flag = field.name.upper()
        after = said.partition(f" {flag}")[2]
        assert re.search(r"[A-Za-z]{2,} [a-z]{2,}", after[:200]), (flag, after[:200])


def test_one_rank_of_a_machine_prints_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit) as end:
        parse(ExtractConfig, ["--help"], "extractor extract")
    assert end.value.code == 0 and capsys.readouterr().out == ""
