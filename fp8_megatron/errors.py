"""The error that a user can fix, and text of foreign files as it is shown."""

from __future__ import annotations

#: Exit status of a program after a `UserError`; argparse's for a bad flag.
USER_ERROR_STATUS = 2


class UserError(ValueError):
    """The user's request cannot work. The text has one line per problem, with the values and the fix.

    Programs print only this text and exit with `USER_ERROR_STATUS`. Values may come from a foreign file, so what cannot
    be printed is written as an escape.
    """

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n")


class CheckpointError(UserError):
    """A checkpoint that cannot be used or was not saved, and why."""


def printable(text: str, *, keep: str = "") -> str:
    """`text` with an escape for every character that cannot be printed, except for those of `keep`.

    A terminal obeys control characters, and a line break can forge a line.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character in keep or character.isprintable() else repr(character)[1:-1] for character in text
    )
