"""The date that chat templates print: one day for all that is ever prepared for a folder."""

import datetime
from dataclasses import dataclass

NAME = "strftime_now"  # transformers' name for the function by which templates ask for the time


@dataclass(frozen=True, slots=True)
class Clock:
    """strftime_now of one day, at midnight. day: as 2026-01-31."""

    day: str

    @classmethod
    def today(cls) -> "Clock":
        return cls(datetime.date.today().isoformat())

    def __post_init__(self) -> None:
        """Raises ValueError for what is no day."""
        datetime.date.fromisoformat(self.day)

    def __call__(self, format: str) -> str:
        return datetime.datetime.fromisoformat(self.day).strftime(str(format))
