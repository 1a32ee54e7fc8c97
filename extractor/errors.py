"""The ways in which a run ends that are somebody's to mend, and the codes it ends with."""

EXIT_OK, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
EXIT_REJECTS = 3  # all is done that can be
EXIT_AGAIN = 75  # the same command goes on; sysexits.h: EX_TEMPFAIL


class UsageError(ValueError):
    """What the user gave cannot be run. Shown as one line; exit code 2; nothing has been written."""


class SharedUsageError(UsageError):
    """The same, found by every rank of this machine for itself: the first of them shows it."""


class RunError(RuntimeError):
    """A run that had begun cannot go on (a full disk, a broken store). One line; exit code 1."""


class PeerError(RunError):
    """Another rank's error, heard here. That rank shows it; this one does so only when the other is
    elsewhere, on another machine, whose output a person may not see.

    Attributes:
        code: what this rank ends with, as the other does.
    """

    def __init__(self, text: str, *, elsewhere: bool, code: int = EXIT_FAILED) -> None:
        super().__init__(text)
        self.elsewhere, self.code = elsewhere, code


def disk_error(error: OSError) -> RunError:
    """One line with the path and the errno, for what the operating system refused."""
    return RunError(
        f"cannot write {error.filename}: {error.strerror} (errno {error.errno}); everything "
        "finished so far is whole: mend that and run the same command again (docs/reliability.md)"
    )
