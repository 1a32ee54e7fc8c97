"""Templates and tokenizers of strangers: what they would run does not run."""

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from extractor.config import DataConfig
from extractor.errors import UsageError
from extractor.model import ModelSpec
from extractor.rows.tokenizer import load_rules
from tests.support.data_kit import Make, chat, convert

# MARK stands for a file that code which runs would make.
ESCAPES = {
    "a class's others": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals of a helper": "{{ raise_exception.__globals__['__builtins__'].open('MARK', 'w') }}",
    "globals of jinja's own": "{{ cycler.__init__.__globals__.os.system('touch MARK') }}",
    "lipsum": "{{ lipsum.__globals__['os'].system('touch MARK') }}",
    "through attr": "{{ (messages | attr('__class__') | attr('__mro__'))[1] }}",
    "through format": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "a mutation": "{% set _ = messages.append({'role': 'assistant', 'content': 'x'}) %}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}{{ os.system('touch MARK') }}",
}
TALK = (("user", "Hi"), ("assistant", "Hello"))
REST = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.mark.parametrize("name", ESCAPES)
def test_a_template_cannot_leave_its_sandbox(name: str, converter: Make, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    source = ESCAPES[name].replace("MARK", str(mark)) + REST
    try:
        outcome = convert(converter(source=source), chat(*TALK))
    except UsageError:
        outcome = None
    assert not mark.exists()
    assert outcome is None or (outcome.refusals and not outcome.pieces), outcome


def test_a_harmless_template_of_that_form_works(converter: Make) -> None:
    outcome = convert(converter(source=REST), chat(*TALK))
    assert outcome.pieces and not outcome.refusals


@pytest.mark.parametrize("auto", [{"AutoTokenizer": ["evil.Evil", None]}, {}])
def test_a_tokenizer_brings_no_code(
    auto: dict[str, object], toy_model: ModelSpec, tmp_path: Path
) -> None:
    model, mark = tmp_path / "model", tmp_path / "mark"
    shutil.copytree(toy_model.path, model)
    code = f"open({str(mark)!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast\n"
    (model / "evil.py").write_text(code + "class Evil(PreTrainedTokenizerFast): ...\n")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings |= {"auto_map": auto, "tokenizer_class": "Evil"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    spec = dataclasses.replace(toy_model, path=model)

    def load(trust: bool) -> None:
        config = DataConfig(
            model=str(model), data=("x",), output=tmp_path / "out", trust_remote_code=trust
        )
        load_rules(config, spec)

    with contextlib.suppress(UsageError):
        load(trust=False)
    assert not mark.exists()
    if auto:  # the code would have run
        load(trust=True)
        assert mark.exists()
