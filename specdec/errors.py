"""The one exception that callers need to catch."""

from __future__ import annotations

LONGEST = 1000  # characters of a message


class SpecdecError(ValueError):
    """Bad input or an impossible combination: one line that names the thing.

    The message is meant for a person at a shell: it says what is wrong, with which value, and where there is one,
    what would be right. Line breaks and repeated blanks are folded, so that it is always a single line; of a very long
    one, which quotes a whole file or a name of thousands of characters, the middle is left out.
    """

    def __init__(self, message: str) -> None:
        line = " ".join(str(message).split())
        super().__init__(line if len(line) <= LONGEST else f"{line[: LONGEST - 200]} ... {line[-200:]}")
