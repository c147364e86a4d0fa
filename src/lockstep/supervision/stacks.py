"""The Python stacks of a process, asked for from outside.

Python's faulthandler writes them from inside a signal handler: it needs neither the interpreter lock nor the process's
cooperation, so they can be had from one that hangs in a native call as well.
"""

import signal
import sys

# A signal that nobody uses otherwise. None: this system has no such signals, and stacks are not asked for.
ASK_FOR_STACKS: int | None = None if sys.platform in ("win32", "darwin") else signal.SIGRTMIN + 7
