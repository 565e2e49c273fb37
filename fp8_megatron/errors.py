"""The error that a user can fix."""

from __future__ import annotations

#: Exit status of a program after a `UserError`; argparse's for a bad flag.
USER_ERROR_STATUS = 2


class UserError(ValueError):
    """The user's request cannot work. The text has one line per problem, with the values and the fix.

    Programs print only this text and exit with `USER_ERROR_STATUS`.
    """
