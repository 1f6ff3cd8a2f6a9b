"""The one exception that means "the user can mend this".

Whatever a person can cause (a key, a file, a folder, a number of GPUs) raises `UserError`; its message is one line that names
the key, the file and line, or the tensor, and says what to do. The entry points print that line without a stack trace.
Everything else is a bug and keeps its trace.
"""


class UserError(ValueError):
    """A mistake outside the code. The message names what is wrong and the way out."""
