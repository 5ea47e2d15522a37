"""How a command ends: exit codes, and the error that carries one."""

from __future__ import annotations

OK = 0
FAILED = 1  # some requests failed, or the output could not be written
USAGE = 2  # arguments, model or input: nothing was generated
INTERRUPTED = 130  # Ctrl-C


class CommandError(Exception):
    """Ends the command with `error: <message>` and `exit_code`; no traceback."""

    def __init__(self, message: str, exit_code: int = USAGE):
        super().__init__(message)
        self.exit_code = exit_code
