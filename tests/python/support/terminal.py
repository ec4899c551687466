"""A terminal of its own for a command, and the keys that a user presses in it."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import threading
import time

LEFT, CTRL_C, CTRL_D, ENTER = "\x1b[D", "\x03", "\x04", "\r"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


class Terminal:
    """`allspark ARGUMENTS` in a terminal. A `with` block ends the process."""

    def __init__(self, *arguments: object):
        own, theirs = pty.openpty()
        command = [sys.executable, "-m", "allspark.cli", *map(str, arguments)]
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
            env={**os.environ, "TERM": "xterm"}, preexec_fn=_make_controlling,
        )  # fmt: skip
        os.close(theirs)
        self._own = own
        self._output = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        os.close(self._own)

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._own, 1 << 16)
            except OSError:  # the process has ended
                return
            self._output += data

    @property
    def text(self) -> str:
        """What was shown so far, without escape sequences."""
        return _ESCAPES.sub("", self._output.decode(errors="replace"))

    def press(self, *keys: str) -> None:
        """Types texts and keys."""
        os.write(self._own, "".join(keys).encode())

    def wait_for(self, text: str, count: int = 1, seconds: float = 60) -> None:
        """Until a text was shown so often."""
        end = time.monotonic() + seconds
        while self.text.count(text) < count:
            assert time.monotonic() < end, f"{text!r} is not in {self.text!r}"
            time.sleep(0.02)

    def end(self, seconds: float = 60) -> int:
        """The exit status, once the process has ended by itself."""
        return self.process.wait(seconds)


def _make_controlling() -> None:
    """Makes the terminal on stdin that of the session, so that Ctrl-C is a signal."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
