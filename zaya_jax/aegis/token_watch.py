"""Notice that another job has resumed the run while no process of this one looks, as after a partition."""

from pathlib import Path

from zaya_jax.run.fencing import read_token


class TokenWatch:
    """Compares the run's fencing token with the one that this job's newest attempt took; every method reads it."""

    def __init__(self, checkpoints: Path) -> None:
        """Watch the token in a folder of checkpoints."""
        self._folder = checkpoints
        self._number = 0  # of the token when the attempt started, or that it took; 0 for none
        self._host: object = None  # where process 0 of the attempt has taken it, perhaps several times, as in a script
        self.is_superseded = False  # a newer one was taken on another host

    def start_attempt(self) -> None:
        """Expect that this job takes the next token."""
        self._number, self._host = self._read()[0], None

    def look(self) -> None:
        """Set `is_superseded` if another job has taken a token after the attempt had."""
        number, host = self._read()
        if number <= self._number or not host:
            return
        self._number, self._host = number, self._host or host
        self.is_superseded = self.is_superseded or host != self._host

    def _read(self) -> tuple[int, object]:
        token = read_token(self._folder)
        return (0, None) if token is None else (token.number, token.taker.get("host"))
