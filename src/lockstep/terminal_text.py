"""Text for the terminal: what others chose, such as names and error messages, is shown without acting on the terminal.

Names of folders, metrics and tensors, error messages and values in files may contain control characters, which would
move the cursor, recolour or hide lines, or type into the shell. All that lockstep prints for people goes through
`print_line`; where another library writes, as on a live screen, the text goes through `escape_controls` first.
"""

import re
import sys
from typing import TextIO

# Control characters except the tab and the ends of lines, also those of Windows; marks that reverse the order of the
# text after them; and halves of surrogate pairs, which no stream can encode.
_UNSAFE = re.compile("\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_controls(text: object) -> str:
    """Return a text whose control characters can be read, as in `\\x1b[31m`, and have no effect; lines stay lines."""
    return _UNSAFE.sub(_escaped, str(text))


def print_line(text: object = "", *, file: TextIO | None = None, end: str = "\n", flush: bool = False) -> None:
    """Print a text for people, on `file` or standard output, with its control characters escaped.

    It is a single write, so that no line of another process comes between. Without a stream it does nothing.
    """
    stream = sys.stdout if file is None else file
    if stream is not None:
        stream.write(escape_controls(text) + end)
        if flush:
            stream.flush()


def _escaped(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
