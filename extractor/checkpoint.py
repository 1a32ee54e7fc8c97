"""Whether a checkpoint's weight files are all there, told from their names before any is read."""

import json
import re
from pathlib import Path

from extractor.errors import UsageError
from extractor.model import weight_files

_NUMBERED = re.compile(r"^(.*)-(\d{5})-of-(\d{5})(\.[a-z]+)$")
_SHOWN = 3


def check_files(path: Path) -> None:
    """Raises UsageError naming files that an index or their own numbers call for and that are missing,
    and for a folder that holds an adapter and no model."""
    files = weight_files(path)
    names = {file.name for file in files}
    if (path / "adapter_config.json").is_file() and all(n.startswith("adapter_") for n in names):
        raise UsageError(
            f"--model {path}: the folder holds an adapter (adapter_config.json) and not the weights of "
            "a model: merge it into its base model first (peft's merge_and_unload), and give that folder"
        )
    missing = sorted(_named_by_indexes(path, names) | _numbered_siblings(names))
    if missing:
        more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
        raise UsageError(
            f"--model {path}: weight files are missing: {', '.join(missing[:_SHOWN])}{more}; "
            "download them again"
        )


def _named_by_indexes(path: Path, names: set[str]) -> set[str]:
    """Files that the index of the format that is there names, and that are not there."""
    named: set[str] = set()
    for index in path.glob("*.index.json"):
        try:
            found = json.loads(index.read_text())["weight_map"].values()
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"--model {path}: {index.name} is not readable: {error!r}") from error
        named |= {name for name in map(str, found) if not names or name.endswith(_endings(names))}
    return {name for name in named if not (path / name).is_file()}


def _endings(names: set[str]) -> tuple[str, ...]:
    return tuple({Path(name).suffix for name in names})


def _numbered_siblings(names: set[str]) -> set[str]:
    """Of files such as model-00001-of-00004.safetensors, the ones between 1 and 4 that are not there."""
    found = [match for name in names if (match := _NUMBERED.match(name))]
    wanted = {
        f"{match[1]}-{number:05d}-of-{match[3]}{match[4]}"
        for match in found
        for number in range(1, min(int(match[3]), 100_000) + 1)
    }
    return wanted - names
