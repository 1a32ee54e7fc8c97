"""Digests of everything that decides ids and masks: input bytes, tokenizer, template, rules."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import xxhash

BLOCK = 1 << 20
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "*.model", "*.tiktoken", "*tokeniz*.py", "tekken.json",
    "vocab.bpe", "vocab.tsv", "*.vocab", "*.spm", "bpe.codes", "dict.txt",
)  # fmt: skip
SHORT = 16

# What stat gives for a file. with_digests adds the digest of its bytes and the number of newlines.
FileFacts = dict[str, Any]


def text_digest(text: str) -> str:
    return xxhash.xxh3_128(text.encode("utf-8", "surrogatepass")).hexdigest()[:SHORT]


def file_facts(path: Path) -> FileFacts:
    """Facts from stat, which tell without reading a file that it has not changed."""
    stat = path.stat()
    return {
        "path": str(path.resolve()),
        "size": stat.st_size,
        "mtime": stat.st_mtime_ns,
        "ctime": stat.st_ctime_ns,
        "inode": stat.st_ino,
    }


def with_digests(files: Sequence[Path], known: Iterable[FileFacts]) -> list[FileFacts]:
    """Facts of each file, with the `digest` of its bytes and its number of `newlines`.

    A file whose facts are equal to those of a known one has not changed. It is not read again, and
    both values are taken from there.

    Raises:
        OSError: a file cannot be read.
    """
    remembered = {_stat_key(facts): facts for facts in known}
    found: list[FileFacts] = []
    for path in files:
        facts = file_facts(path)
        found.append(remembered.get(_stat_key(facts)) or facts | _read_through(path))
    return found


def _stat_key(facts: Mapping[str, Any]) -> str:
    return json.dumps([facts[key] for key in ("path", "size", "mtime", "ctime", "inode")])


def _read_through(path: Path) -> dict[str, Any]:
    digest = xxhash.xxh3_128()
    newlines = 0
    with path.open("rb") as handle:
        while block := handle.read(BLOCK):
            digest.update(block)
            newlines += block.count(b"\n")
    return {"digest": digest.hexdigest(), "newlines": newlines}


def tokenizer_digest(path: Path) -> str:
    """xxh3-128, cut to SHORT hex digits, of the files in a model folder that decide the ids."""
    digest = xxhash.xxh3_128()
    names = sorted({file for pattern in TOKENIZER_FILES for file in path.glob(pattern)})
    for file in names:
        digest.update(file.name.encode() + b"\0")
        if file.name == "tokenizer_config.json":
            digest.update(_config_without_template(file))
        else:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:SHORT]


def code_digest(path: Path) -> str:
    """xxh3-128, cut to SHORT hex digits, of the Python files in a model folder; "" when there are none.

    The tokenizer may import any of them.
    """
    digest = xxhash.xxh3_128()
    files = sorted(path.glob("*.py"))
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:SHORT] if files else ""


def _config_without_template(file: Path) -> bytes:
    """The file without its template, which has a digest of its own, and without other keys that do
    not change ids. So a message can tell a changed template from a changed tokenizer."""
    config: dict[str, Any] = json.loads(file.read_text())
    for key in ("chat_template", "name_or_path", "transformers_version"):
        config.pop(key, None)
    return json.dumps(config, sort_keys=True).encode()


def combined(parts: Mapping[str, str]) -> str:
    return xxhash.xxh3_128(json.dumps(dict(sorted(parts.items()))).encode()).hexdigest()
