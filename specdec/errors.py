"""The one exception that callers need to catch."""

from __future__ import annotations


class SpecdecError(ValueError):
    """Bad input or an impossible combination: one line that names the thing.

    The message is meant for a person at a shell: it says what is wrong, with which value, and where there is one,
    what would be right. Line breaks and repeated blanks are folded, so that it is always a single line.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(str(message).split()))
