"""The two ways in which a run ends that are somebody's to mend."""


class UsageError(ValueError):
    """What the user gave cannot be run. Shown as one line; exit code 2; nothing has been written."""


class RunError(RuntimeError):
    """A run that had begun cannot go on (a full disk, a broken store). One line; exit code 1."""
