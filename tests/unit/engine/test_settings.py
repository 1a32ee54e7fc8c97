"""What of the engine's settings is in a folder's fingerprint, in one spelling."""

import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from extractor.config import key_value
from extractor.engine import compat, settings
from extractor.engine import sglang as engine_sglang
from extractor.engine.base import EngineOptions
from extractor.engine.sglang import SGLangEngine
from extractor.errors import UsageError
from extractor.model import ModelSpec
from extractor.output.run_json import Run
from extractor.plan import fingerprint
from extractor.ranks.place import Place
from tests.support.fake_engine import make_model

PLACE = Place(rank=0, local_rank=0, world_size=1, tp=1)
YARN = '{"rope_scaling":{"factor":4,"rope_type":"yarn"}}'


def args(*items: str) -> dict[str, str]:
    return dict(key_value(item, "--sglang") for item in items)


def given(*items: str) -> dict[str, str]:
    return settings.given(args(*items))


@pytest.fixture
def spec(tmp_path: Path) -> ModelSpec:
    return ModelSpec.read(str(make_model(tmp_path / "model")))


def test_every_field_that_is_given_is_in() -> None:
    found = given("load_format=dummy", "quantization=fp8", "kv_cache_dtype=fp8_e4m3", "dtype=half")
    assert found == {
        "load_format": "dummy",
        "quantization": "fp8",
        "kv_cache_dtype": "fp8_e4m3",
        "dtype": "float16",
    }


def test_what_is_harmless_is_not() -> None:
    assert given("mem_fraction_static=0.5", "log_level=info", "tp_size=2", "ep-size=2") == {}


@pytest.mark.parametrize(
    "item",
    [
        "load_format=auto",
        "dtype=auto",
        "dtype=AUTO",
        "quantization=none",
        "kv_cache_dtype=auto",
        "enable-fp32-lm-head=False",
        "enable_fp32_lm_head=0",
        "json_model_override_args={ }",
        "triton_attention_num_kv_splits=8",
    ],
)
def test_a_default_is_as_if_not_given(item: str) -> None:
    assert given(item) == {}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("enable_fp32_lm_head=true", "enable-fp32-lm-head=1"),
        ("enable_fp32_lm_head=true", "enable_fp32_lm_head=True"),
        ("dtype=half", "dtype=Float16"),
        ("dtype=float", "dtype=float32"),
        (
            f"json_model_override_args={YARN}",
            'json-model-override-args={ "rope_scaling" : {"rope_type": "yarn", "factor": 4.0} }',
        ),
        ("load_format=dummy", "load-format= dummy "),
    ],
)
def test_spellings_are_the_same(one: str, other: str) -> None:
    assert given(one) == given(other) != {}


def test_other_values_are_others() -> None:
    assert given(f"json_model_override_args={YARN}") != given(
        f"json_model_override_args={YARN.replace('4', '4.5')}"
    )


def test_unknown_fields_are_refused_but_not_those_of_an_earlier_run() -> None:
    with pytest.raises(UsageError, match="no such field"):
        given("load_fromat=dummy")
    then = settings.given_then(args("load_fromat=dummy", "log_level=info"))
    assert then == {"load_fromat": "dummy"}


def test_harmless_fields_are_fields() -> None:
    fields = inspect.signature(compat.symbol("sglang.srt.server_args", "ServerArgs")).parameters
    assert not {*settings.HARMLESS, *settings.SET_HERE} - set(fields)
    assert not settings.SET_HERE & set(settings.HARMLESS)


def server_args(spec: ModelSpec, device: str, *items: str) -> dict[str, Any]:
    """What the engine gives SGLang, where compat.server_args gives back what it is given."""
    engine = object.__new__(SGLangEngine)
    engine._options = EngineOptions(
        device=torch.device(device),
        max_tokens=64,
        max_sequences=8,
        longest=32,
        sglang_args=args(*items),
    )
    return engine._server_args(spec, PLACE)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("architecture", ["FakeForCausalLM", "GptOssForCausalLM"])
def test_what_the_engine_sets_is_known(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, device: str, architecture: str
) -> None:
    """A field that the engine gives another value than SGLang's default is harmless, the dtype, or one
    whose default is something else than not to give it."""
    monkeypatch.setattr(compat, "server_args", lambda values: values)
    values = server_args(dataclasses.replace(spec, architecture=architecture), device)
    fields = inspect.signature(compat.symbol("sglang.srt.server_args", "ServerArgs")).parameters
    changed = {name for name, value in values.items() if value != fields[name].default}
    # --trust-remote-code is the user's word for the one, and each run has the other as it needs it.
    assert changed - {"trust_remote_code"} <= {*settings.HARMLESS, *settings.SET_HERE, "dtype"}


@pytest.mark.parametrize("item", ["dtype=auto", "dtype=float32", "dtype=half", ""])
@pytest.mark.parametrize("units", [False, True])
def test_the_engine_computes_in_what_is_foretold(
    spec: ModelSpec, monkeypatch: pytest.MonkeyPatch, units: bool, item: str
) -> None:
    for module in (settings, engine_sglang):
        monkeypatch.setattr(module, "cpu_multiplies_bfloat16", lambda: units)
    monkeypatch.setattr(compat, "server_args", lambda values: values)
    items = (item,) if item else ()
    asked = server_args(spec, "cpu", *items).get("dtype", "auto")
    computed = {"auto": spec.served_dtype, "half": "float16"}.get(asked, asked)
    assert computed == settings.computing_dtype(spec, torch.device("cpu"), args(*items))


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float32"}, "float16"),
        ({}, "float16"),
        ({"model_type": "gemma2", "dtype": "float32"}, "bfloat16"),
        ({"model_type": "gemma3_text"}, "bfloat16"),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 2}}, "bfloat16"),
        ({"model_type": "llama4", "dtype": "bfloat16", "text_config": {}}, "bfloat16"),
    ],
)
def test_computing_dtype_is_sglangs(tmp_path: Path, config: dict[str, Any], wanted: str) -> None:
    """What ModelSpec says of a GPU is what SGLang's own function says of the same config."""
    from sglang.srt.configs.model_config import _get_and_verify_dtype
    from sglang.srt.utils.hf_transformers_utils import get_hf_text_config
    from transformers import AutoConfig

    whole = {"architectures": ["X"], "model_type": "llama", **config}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert ModelSpec.read(str(tmp_path)).served_dtype == wanted
    theirs = get_hf_text_config(AutoConfig.from_pretrained(tmp_path))
    assert str(_get_and_verify_dtype(theirs, "auto")) == f"torch.{wanted}"


def test_computing_dtype_of_a_device(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    def of(device: str, *items: str, architecture: str = "FakeForCausalLM") -> str:
        model = dataclasses.replace(spec, architecture=architecture)
        return settings.computing_dtype(model, torch.device(device), args(*items))

    for units, wanted in ((False, "float32"), (True, "bfloat16")):
        monkeypatch.setattr(settings, "cpu_multiplies_bfloat16", lambda units=units: units)
        assert of("cpu") == of("cpu", "dtype=auto") == wanted
        assert of("cpu", architecture="GptOssForCausalLM") == "bfloat16"
        assert of("cpu", "dtype=half") == "float16"
    assert of("cuda") == "bfloat16"


# Parts of a folder --------------------------------------------------------------------------------


OLD = {"model": "m", "dtype": "bfloat16"}


def named(
    then: dict[str, str], now: dict[str, str], run: dict[str, Any] | None = None
) -> list[str]:
    record = Run(fingerprint="0", parts=then, **(run or {}))
    before = fingerprint.parts_of_run(record, now, settings.given_then)
    return fingerprint.changes(before, now)


def test_a_folder_without_the_parts_goes_on_where_nothing_was_given() -> None:
    now = OLD | {"computed in": "float32", "quantization files": "abc"}
    for run in ({}, {"config": {}}, {"config": {"sglang": []}}, {"config": {"sglang": None}}):
        assert named(OLD, now, run) == []
    given_then = {"config": {"sglang": ["dtype=half", "log_level=info"]}}
    assert named(OLD, now | {"sglang dtype": "float16"}, given_then) == []
    assert named(OLD, now, {"engine": {"compute_dtype": "float32"}}) == []


def test_a_folder_without_the_parts_is_refused_by_what_it_says() -> None:
    now = OLD | {"computed in": "float32"}
    assert named(OLD, now, {"config": {"sglang": ["load_format=dummy"]}}) == [
        "sglang load_format: dummy then, absent now"
    ]
    assert named(OLD, now, {"engine": {"compute_dtype": "bfloat16"}}) == [
        "computed in: bfloat16 then, float32 now"
    ]


def test_the_dtype_is_named_by_its_flag() -> None:
    then = OLD | {"computed in": "bfloat16"}
    now = OLD | {"computed in": "float16", "sglang dtype": "float16"}
    assert "sglang dtype: absent then, float16 now" in named(then, now)


def test_the_same_dtype_by_another_way_is_the_same() -> None:
    """A folder of a CPU, which computed in float32 by itself, goes on on a GPU that is told to."""
    then = OLD | {"computed in": "float32"}
    assert named(then, then | {"sglang dtype": "float32"}) == []
    assert named(then, OLD | {"computed in": "bfloat16"}) != []


def test_a_quantization_file_that_came_later() -> None:
    then = OLD | {"computed in": "bfloat16"}
    assert named(then, then | {"quantization files": "abc"}) == [
        "quantization files: absent then, abc now"
    ]
