"""Values of flags and of --config: held to their types, the same in both, each wrong one a line."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from extractor.config import DataConfig, ExtractConfig, PrepareConfig, ShowConfig, parse
from extractor.errors import UsageError
from extractor.values import number
from extractor.verbs.check import CheckConfig
from extractor.verbs.convert import ConvertConfig
from extractor.verbs.report import ReportConfig
from extractor.verbs.verify import VerifyConfig

NEEDED = {"model": "m", "data": ["a.jsonl"], "output": "out"}
FLAGS = ["--model", "m", "--data", "a.jsonl", "--output", "out"]
# A field of each type, as a file may give it, and what becomes of it.
FIELDS: dict[str, tuple[Any, Any]] = {
    "model": ("~/models/x", "{home}/models/x"),
    "data": (["a.jsonl", "~/b.jsonl"], ("a.jsonl", "{home}/b.jsonl")),
    "output": ("~/out", Path("{home}/out")),
    "max_length": (4096, 4096),
    "overlong": ("skip", "skip"),
    "bad_rows": ("skip", "skip"),
    "chat_template": ("~/t.jinja", Path("{home}/t.jinja")),
    "template_arg": (
        {"enable_thinking": False, "level": "false", "n": 3, "who": "me"},
        ("enable_thinking=false", 'level="false"', "n=3", "who=me"),
    ),
    "supervise": ("last", "last"),
    "turns": ("each", "each"),
    "min_length": (0, 0),
    "min_supervised": (2, 2),
    "limit": (9, 9),
    "shuffle_seed": (-1, -1),
    "draft_vocab_size": (32000, 32000),
    "trust_remote_code": (True, True),
    "workers": (3, 3),
    "layers": ([2, 30, "embed"], "2,30,embed"),
    "final": (False, False),
    "dtype": ("float16", "float16"),
    "topk_logits": (8, 8),
    "tp": (2, 2),
    "batch_tokens": (None, None),
    "shard": ("1/4", "1/4"),
    "device": ("cpu", "cpu"),
    "sglang": (
        {"attention-backend": "triton", "mem_fraction_static": 0.8, "json": {"a": [1, True]}},
        ("attention-backend=triton", "mem_fraction_static=0.8", 'json={"a": [1, true]}'),
    ),
    "layout": ("specforge", "specforge"),
    "durability": ("group", "group"),
    "stuck_after": (90, 90.0),
    "writers": (1, 1),
    "host_memory": (1.5, 1.5),
    "self_check": (False, False),
    "layer_proof": (False, False),
    "dry_run": (True, True),
    "json": (True, True),
    "tokens_per_second": (1e4, 1e4),
    "verbose": (True, True),
}


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return str(tmp_path / "home")


def written(tmp_path: Path, text: str | dict[str, Any]) -> str:
    path = tmp_path / "run.yaml"
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text, sort_keys=False))
    return str(path)


def at_home(value: Any, home: str) -> Any:
    if isinstance(value, tuple):
        return tuple(at_home(item, home) for item in value)
    return (
        type(value)(str(value).format(home=home))
        if isinstance(value, Path)
        else (value.replace("{home}", home) if isinstance(value, str) else value)
    )


def refusal(kind: type, argv: list[str]) -> str:
    with pytest.raises(UsageError) as refused:
        parse(kind, argv, "extractor verb")
    return str(refused.value)


def test_one_file_serves_both_verbs(
    tmp_path: Path, home: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every field of a file arrives as its type, and prepare names what it has no use for, once."""
    assert set(FIELDS) == {field.name for field in dataclasses.fields(ExtractConfig)}
    file = written(tmp_path, {name.replace("_", "-"): value for name, (value, _) in FIELDS.items()})
    whole = parse(ExtractConfig, ["--config", file], "extractor extract")
    for name, (_, wanted) in FIELDS.items():
        value = getattr(whole, name)
        assert value == at_home(wanted, home), name
        assert type(value) is type(at_home(wanted, home)), name
    assert capsys.readouterr().err == ""
    part = parse(PrepareConfig, [f"--config={file}"], "extractor prepare")
    for field in dataclasses.fields(PrepareConfig):
        assert getattr(part, field.name) == getattr(whole, field.name)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "has no use for layers, final, dtype" in said
    assert "max_length" not in said


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ('trust_remote_code: "false"', "wanted true or false"),
        ("trust_remote_code: yes", "wanted true or false"),
        ("trust_remote_code: 1", "wanted true or false"),
        ("trust_remote_code: !!bool maybe", "wanted true or false"),
        ("overlong: Skip", "wanted truncate or skip; did you mean skip?"),
        ("supervise: asistant", "did you mean assistant?"),
        ("max_length: 012", "wanted a whole number, 1 or more"),
        ("max_length: 1e5", "wanted a whole number, 1 or more"),
        ("max_length: 1_000", "wanted a whole number"),
        ('max_length: "512"', "wanted a whole number"),
        ("max_length: 0", "wanted a whole number, 1 or more"),
        ("max_length: 2026-12-01", "wanted a whole number"),
        ("max_length: 1:30", "wanted a whole number"),
        ("max_length: true", "wanted a whole number"),
        (f"max_length: {'9' * 30}", "wanted a whole number"),
        (f"max_length: {'9' * 5000}", "wanted a whole number"),
        ("min_length: -1", "wanted a whole number, 0 or more"),
        ("min_supervised: -1", "wanted a whole number, 0 or more"),
        ("topk_logits: -1", "wanted a whole number, 0 or more"),
        ("host_memory: .nan", "wanted a number, above 0"),
        ("host_memory: 1e400", "wanted a number, above 0"),
        ("stuck_after: .inf", "wanted a number, 0 or more"),
        ("stuck_after: -1", "wanted a number, 0 or more"),
        ("tokens_per_second: 0", "wanted a number"),
        ("data: []", "wanted a list"),
        ("data: [1]", "wanted a list"),
        ("output:", "wanted a path"),
        ('output: ""', "wanted a path"),
        ('model: ""', "wanted a path"),
        ('model: "a\\0b"', "wanted a path"),
        ("model: 7", "wanted a path"),
        ("layers: 1.5", "wanted text"),
        ("layers: [1, true]", "wanted text"),
        ("layers: no", "__accepted__"),
        ("sglang: 5", "wanted KEY=VALUE"),
        ("sglang: [novalue]", "wanted KEY=VALUE"),
        ("template_arg: {a: 1, a: 2}", "a is given twice"),
        ("limit: 1\nlimit: 2", "limit is given twice"),
        ("max-length: 1\nmax_length: 2", "max_length is given twice"),
        ("layer: 1", "no such field; did you mean layers?"),
        ("1: 2", "no such field"),
        ("? [a]\n: 1", "wanted a word as a key"),
        ("limit: [", "line "),
        ("limit: !!python/name:os.system", "line 1"),
        ("- a", "wanted a mapping"),
        ("limit: 1\n---\nlimit: 2", "document"),
        ("x: " + "[" * 5000, "nested too deeply"),
        ("shuffle_seed: 1", "give --limit too"),
        ("max_length: 5\nmin_length: 6", "--min-length 6 is more than --max-length 5"),
    ],
)
@pytest.mark.parametrize("kind", [ExtractConfig, PrepareConfig])
def test_wrong_values_of_a_file(tmp_path: Path, kind: type, line: str, wanted: str) -> None:
    argv = [*FLAGS, "--config", written(tmp_path, line)]
    if wanted == "__accepted__":  # a word like any other, whatever YAML 1.1 makes of it
        assert parse(ExtractConfig, argv, "extractor verb").layers == "no"
        return
    said = refusal(kind, argv)
    assert wanted in said and "\n" not in said and len(said) < 400


def test_files_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe")
    assert "not UTF-8" in refusal(ExtractConfig, ["--config", str(tmp_path / "run.yaml")])
    assert "No such file" in refusal(ExtractConfig, ["--config", str(tmp_path / "none.yaml")])
    assert "directory" in refusal(ExtractConfig, ["--config", str(tmp_path)])
    assert "given 2 times" in refusal(ExtractConfig, ["--config", "a", "--config", "b"])
    empty = written(tmp_path, "# nothing\n")
    assert parse(ExtractConfig, [*FLAGS, "--config", empty], "extractor extract").model == "m"


def test_the_file_itself_may_be_at_home(tmp_path: Path, home: str) -> None:
    Path(home).mkdir()
    (Path(home) / "run.yaml").write_text("limit: 3")
    argv = [*FLAGS, "--config=~/run.yaml"]
    assert parse(PrepareConfig, argv, "extractor prepare").limit == 3


def test_several_wrong_values_are_a_line_each(tmp_path: Path) -> None:
    file = written(tmp_path, {"limit": 0, "turns": "Each", "nothing": 1})
    said = refusal(ExtractConfig, [*FLAGS, "--config", file]).split("\n")
    assert len(said) == 3 and all(line.startswith(f"--config {file}: ") for line in said)
    said = refusal(ExtractConfig, [*FLAGS, "--limit", "0", "--turns", "Each"]).split("\n")
    assert said == [
        "--limit 0: wanted a whole number, 1 or more",
        "--turns Each: wanted whole or each; did you mean each?",
    ]


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ("--max-lenght 3", "--max-lenght: no such flag; did you mean --max-length?"),
        ("--no-finl", "--no-finl: no such flag"),
        ("--limit", "--limit: wanted a value after it"),
        ("--limit x", "--limit x: wanted a whole number, 1 or more"),
        ("--limit -3", "--limit -3: wanted a whole number, 1 or more"),
        ("--limit 1e5", "--limit 1e5: wanted a whole number, 1 or more"),
        ("--limit 5 6", "6: no flag takes this word"),
        ("--layers ''", "__accepted__"),
        ("--final=no", "--final takes no value: wanted --final or --no-final"),
        ("--stuck-after nan", "--stuck-after nan: wanted a number, 0 or more"),
        ("--host-memory inf", "--host-memory inf: wanted a number, above 0"),
        ("--output=", "--output '': wanted a path"),
        ("--overlong SKIP", "did you mean skip?"),
        ("--sglang x", "--sglang x: wanted KEY=VALUE"),
        ("--sglang =x", "--sglang =x: wanted KEY=VALUE"),
        ("--shard 4/4", "--shard 4/4: wanted I/N with 0 <= I < N"),
        ("--shard \u0661/4", "wanted I/N"),
        ("--json", "--json and --tokens-per-second go with --dry-run"),
        ("--config", "--config: wanted a value after it"),
        ("--limit \x1b[31m", r"--limit \x1b[31m: wanted a whole number"),
        ("--x\x1b", r"--x\x1b: no such flag"),
    ],
)
def test_wrong_flags(flags: str, wanted: str) -> None:
    words = [word.strip("'") for word in flags.split(" ")]
    if wanted == "__accepted__":
        assert parse(ExtractConfig, [*FLAGS, *words], "extractor extract").layers == ""
        return
    said = refusal(ExtractConfig, [*FLAGS, *words])
    assert said.startswith(wanted) or wanted in said
    assert "\n" not in said and "\x1b" not in said


@pytest.mark.parametrize(
    ("kind", "words", "wanted"),
    [
        (PrepareConfig, [*FLAGS, "--limit", "0"], "wanted a whole number, 1 or more"),
        (PrepareConfig, [*FLAGS, "--workers", "-1"], "wanted a whole number, 1 or more"),
        (PrepareConfig, [*FLAGS, "--tp", "2"], "a flag of extract"),
        (ShowConfig, ["x", "--row", "-1"], "wanted a whole number, 0 or more"),
        (ShowConfig, ["x", "--turns", "all"], "wanted whole or each"),
        (ShowConfig, [], "TARGET is missing"),
        (ShowConfig, ["x", "y"], "y: no flag takes this word"),
        (CheckConfig, ["x", "--workers", "0"], "wanted a whole number, 1 or more"),
        (VerifyConfig, ["x", "--samples", "0"], "wanted a whole number, 1 or more"),
        (VerifyConfig, ["x", "--device", "gpu"], "wanted auto, cuda or cpu"),
        (ConvertConfig, ["x", "--workers", "0"], "wanted a whole number, 1 or more"),
        (ConvertConfig, ["x", "--layout", "nativ", "y"], "did you mean native?"),
        (ConvertConfig, ["x"], "OUTPUT is missing"),
        (ReportConfig, ["x", "--states-of", "-1"], "wanted a whole number, 0 or more"),
        (ExtractConfig, ["--data", "x"], "--model and --output are missing"),
    ],
)
def test_every_verb_checks_its_flags(kind: type, words: list[str], wanted: str) -> None:
    assert wanted in refusal(kind, words)


def test_words_in_any_order() -> None:
    config = parse(ConvertConfig, ["a", "--layout", "native", "b"], "extractor convert")
    assert (config.source, config.output) == (Path("a"), Path("b"))
    config = parse(ExtractConfig, [*FLAGS, "--max_length=5", "--data", "b"], "extractor extract")
    assert config.max_length == 5 and config.data == ("a.jsonl", "b")
    assert parse(ExtractConfig, [*FLAGS, "--max-length", "None"], "x").max_length is None


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, {**NEEDED, "limit": 3, "sglang": {"a-b": 1, "c": 2}, "final": False})
    argv = ["--limit", "4", "--config", file, "--sglang", "a_b=9", "--sglang", "d=3", "--final"]
    config = parse(ExtractConfig, argv, "extractor extract")
    assert config.limit == 4 and config.final
    assert config.sglang_args == {"a_b": "9", "c": "2", "d": "3"}
    assert config.sglang == ("a_b=9", "c=2", "d=3")


@pytest.mark.parametrize(
    "wrong", [{"limit": 0}, {"overlong": "cut"}, {"data": ()}, {"min_length": -1}, {"workers": 1.5}]
)
def test_a_configuration_is_checked_when_it_is_made(wrong: dict[str, Any]) -> None:
    values: dict[str, Any] = {"model": "m", "data": ("a",), "output": Path("o"), **wrong}
    with pytest.raises(UsageError):
        DataConfig(**values)
    good = DataConfig(model="m", data=("a",), output=Path("o"))
    with pytest.raises(UsageError):
        dataclasses.replace(good, **wrong)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(sorted(FIELDS)),
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=5,
    ),
)
def test_any_value_is_taken_as_its_type_or_refused(tmp_path: Path, name: str, value: Any) -> None:
    file = written(tmp_path, {**NEEDED, "limit": 1, "dry_run": True, name: value})
    try:
        config = parse(ExtractConfig, ["--config", file], "extractor extract")
    except UsageError as error:
        assert str(error)
        return
    example = FIELDS[name][1]
    taken = getattr(config, name)
    assert taken is None or isinstance(taken, type(example) if example is not None else int)
    if isinstance(taken, str) and isinstance(value, str) and not value.startswith("~"):
        assert taken == value


@pytest.mark.parametrize(
    "text", ["012", "1_0", "+5", " 5", "0x1", "nan", "inf", "", "1e", "\u0665"]
)
def test_no_number(text: str) -> None:
    assert number(text) == text


@given(st.integers(-(10**18), 10**18) | st.floats(allow_nan=False, allow_infinity=False))
def test_numbers(value: float) -> None:
    assert number(json.dumps(value)) == value
