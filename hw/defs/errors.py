"""The one exception a user is meant to see."""


class UserError(Exception):
    """Something the user can mend: a file, a flag, a value, a missing tool.

    The message is one line that says what is wrong, where, and how to mend it. Command-line
    programs print it after ``plora: error:`` and exit with status 2, without a traceback.
    """
