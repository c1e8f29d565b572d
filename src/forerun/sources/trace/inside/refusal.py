"""Refusal: the exception that ends a traced program whose trace would be wrong."""

from __future__ import annotations


class Refusal(BaseException):
    """Ends a traced program with a message for its user. It is no exception that a program would catch, because a
    program that catches it would go on with other code than on a GPU."""

    def __init__(self, message: str, line: str = "") -> None:
        super().__init__(message)
        self.line = line
        """File and line of the program, where the traceback does not show them."""
