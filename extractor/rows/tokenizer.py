"""Loads the model's tokenizer and chat template into plain values, which worker processes need."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from extractor.config import DataConfig, key_value
from extractor.errors import UsageError
from extractor.model import ModelSpec
from extractor.printable import printable
from extractor.rows.clock import NAME, Clock
from extractor.rows.converter import Rules
from extractor.rows.masks.encode import FastEncoder
from extractor.rows.masks.render import parse_argument
from extractor.rows.normalise import RESERVED
from extractor.rows.records import Limits

# A model folder that holds none of these files has no tokenizer.
TOKENIZER_FILES = ("tokenizer*", "*.tiktoken", "vocab.*", "*.model", "tekken.json", "*.gguf")

# Tokenizers split this text in different ways. It tells whether the `tokenizers` library alone gives
# the same ids as the transformers tokenizer.
PROBE = "Hello  wörld!\n\n  don't 12345 東京 🙂\tx"


def load_rules(config: DataConfig, model: ModelSpec, clock: Clock | None = None) -> Rules:
    """The Rules for this model and these flags.

    Args:
        clock: the day that templates print, unless --template-arg strftime_now gives another. None
            means today.

    Raises:
        UsageError: the tokenizer or the template cannot be read.
    """
    arguments = template_arguments(config)
    try:
        tokenizer: Any = (
            AutoTokenizer.from_pretrained(model.path, trust_remote_code=config.trust_remote_code)
            if any(path for name in TOKENIZER_FILES for path in model.path.glob(name))
            else _no_tokenizer()
        )
    except Exception as error:  # OSError, ValueError, and whatever a tokenizer's own code raises
        first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"--model {model.path}: the tokenizer cannot be loaded: {printable(first)}"
        ) from error
    templates = _templates(tokenizer, config.chat_template)
    added = tokenizer.added_tokens_decoder.values()
    special = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
    return Rules(
        tokenizer=_serialized(tokenizer),
        tokenizer_path=str(model.path),
        trust_remote_code=config.trust_remote_code,
        templates=templates,
        variables={NAME: clock or Clock.today(), **tokenizer.special_tokens_map, **arguments},
        special_tokens=tuple(sorted(special or {str(token) for token in added})),
        eos=tokenizer.eos_token,
        added_tokens=tuple(sorted(map(str, added))),
        supervise=config.supervise,
        turns=config.turns,
        limits=Limits(
            vocab_size=model.vocab_size,
            context_length=model.context_length,
            max_length=config.max_length,
            overlong=config.overlong,
            min_length=config.min_length,
            min_supervised=config.min_supervised,
        ),
    )


def _no_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer without a vocabulary, for a model folder that has no tokenizer.

    Rows of ids still work with it. Text becomes no tokens, so a row of text is rejected.
    """
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))


def prints_date(rules: Rules) -> bool:
    return any(NAME in text for text in rules.templates.values())


def template_arguments(config: DataConfig) -> dict[str, Any]:
    """The values of --template-arg by name. Raises UsageError for an argument that the row gives."""
    arguments: dict[str, Any] = {}
    for item in config.template_arg:
        key, _, _ = item.partition("=")
        _, value = key_value(item, "--template-arg")
        if key in RESERVED:
            raise UsageError(f"--template-arg {item}: {key} comes from the row")
        arguments[key.strip()] = _day(item, value) if key == NAME else parse_argument(value)
    return arguments


def _day(item: str, value: str) -> Clock:
    try:
        return Clock(value.strip('"'))
    except ValueError:
        raise UsageError(
            f"--template-arg {printable(item)}: wanted the day to print, as 2026-01-31"
        ) from None


def _templates(tokenizer: Any, file: Path | None) -> dict[str, str]:
    if file is not None:
        try:
            return {"default": file.expanduser().read_text(encoding="utf-8")}
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--chat-template {file}: {error}") from error
    own = tokenizer.chat_template
    if isinstance(own, dict):
        return {str(name): str(text) for name, text in own.items()}
    return {"default": own} if own else {}


def _serialized(tokenizer: Any) -> str | None:
    """The tokenizer as JSON for the `tokenizers` library.

    None when that library alone does not give the ids that the transformers tokenizer gives.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return None
    serialized: str = tokenizer.backend_tokenizer.to_str()
    ours = FastEncoder(serialized).encode([PROBE])[0].ids.tolist()
    theirs = tokenizer(PROBE, add_special_tokens=False)["input_ids"]
    return serialized if ours == theirs else None
