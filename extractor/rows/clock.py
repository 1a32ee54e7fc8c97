"""The date that chat templates print. An output folder keeps one day for all its prepared rows."""

import datetime
from dataclasses import dataclass

NAME = "strftime_now"  # transformers' name for the function by which templates ask for the time


@dataclass(frozen=True, slots=True)
class Clock:
    """A strftime_now function that always answers with midnight of one day.

    Attributes:
        day: an ISO date, such as "2026-01-31".
    """

    day: str

    @classmethod
    def today(cls) -> "Clock":
        return cls(datetime.date.today().isoformat())

    def __post_init__(self) -> None:
        """Raises ValueError when day is not an ISO date."""
        datetime.date.fromisoformat(self.day)

    def __call__(self, format: str) -> str:
        return datetime.datetime.fromisoformat(self.day).strftime(str(format))
