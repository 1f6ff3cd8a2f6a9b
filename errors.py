"""The one exception that means "the user can mend this".

Whatever a person can cause (a key, a file, a folder, a number of GPUs) raises `UserError`; its message is one line that names
the key, the file and line, or the tensor, and says what to do. The entry points print that line without a stack trace.
Everything else is a bug and keeps its trace.
"""


class UserError(ValueError):
    """A mistake outside the code. The message names what is wrong and the way out."""


def explain_permission(error: Exception) -> str:
    """The error's own words; of a file that may not be touched, its name and the way out."""
    if isinstance(error, PermissionError):
        return f"{error.filename}: permission denied; ask its owner, or take another path"
    return str(error)
