"""The error that a user can put right."""

from __future__ import annotations

#: Exit status of a program after one, as argparse's for a bad flag.
USER_ERROR_STATUS = 2


class UserError(ValueError):
    """What the user asked for cannot work; one line a problem, with the values and the fix.

    Programs show its text alone and exit with `USER_ERROR_STATUS`; any other exception shows where it was raised.
    """
