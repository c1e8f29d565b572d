"""The errors a user can cause. The console prints their one line and exits with status 2."""


class ForerunError(ValueError):
    """Bad input: the message is one line that names the thing, the place and the fix."""


class UnknownName(ForerunError):
    """A name that is not in a catalogue."""

    def __init__(self, what: str, name: str, known: list[str]) -> None:
        super().__init__(f"unknown {what} {name!r}; known: {', '.join(sorted(known))}")


class ImpossiblePlan(ForerunError):
    """A plan that cannot run: the message gives the reason."""
