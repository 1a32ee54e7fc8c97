"""Switches: keys by which a row excludes a message, or the whole row, from training."""

from collections.abc import Mapping
from typing import Any

from extractor.rows.records import BadRow, Message, short

ON = ("weight", "train", "training", "trainable", "loss")  # 0 or false excludes
OFF = ("masked",)  # the key that torchtune uses; here true excludes


def take_switch(message: Message) -> bool | None:
    """Remove the switches from a message and return their value: True when it is trained on.

    Returns None when the message has no switch.

    Raises:
        BadRow: a value is neither 0 nor 1, or two switches differ.
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
    """The keys of a row that are switches and are on.

    A weight such as 0.5 is not a switch: the row is used in full.

    Raises:
        BadRow: "switched_off", when a switch is off.
    """
    found = {key for key in ON if _is_switch(record.get(key))}
    for key in sorted(found):
        if not record[key]:
            raise BadRow("switched_off", f"the row's own {key} is {short(record[key])}")
    return found


def _is_switch(value: Any) -> bool:
    return isinstance(value, bool | int | float) and value in (0, 1)
