"""Keys by which a row says that a message, or all of it, is not to be learned from."""

from collections.abc import Mapping
from typing import Any

from extractor.rows.records import BadRow, Message, short

ON = ("weight", "train", "training", "trainable", "loss")  # 0 or false: not to be learned from
OFF = ("masked",)  # torchtune's word: true is what false is above


def take_switch(message: Message) -> bool | None:
    """Whether the message is to be learned from, as its own keys say, or None; takes them out.

    Raises:
        BadRow: a value that is neither yes nor no, or two that differ.
    """
    said: dict[str, bool] = {}
    for key in (*ON, *OFF):
        if key in message:
            value = message.pop(key)
            if not _is_switch(value):
                raise BadRow("bad_messages", f"{key} is {short(value)}: wanted 0 or 1")
            said[key] = bool(value) != (key in OFF)
    if len(set(said.values())) > 1:
        raise BadRow("ambiguous", f"{' and '.join(said)} differ")
    return next(iter(said.values()), None)


def row_switches(record: Mapping[str, Any]) -> set[str]:
    """The keys by which a whole row says yes. A weight such as 0.5 is none of them: the row is
    used in full. Raises BadRow ("switched_off") where one says no."""
    found = {key for key in ON if _is_switch(record.get(key))}
    for key in sorted(found):
        if not record[key]:
            raise BadRow("switched_off", f"the row's own {key} is {short(record[key])}")
    return found


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool | int | float) and value in (0, 1)
