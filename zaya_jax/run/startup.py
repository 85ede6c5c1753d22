"""The first moments of a training command: signals are handled before it imports what it needs."""

import atexit
import faulthandler
import signal

from zaya_jax.hardware.detection import use_huge_pages
from zaya_jax.run.command_output import prepare_streams
from zaya_jax.run.progress_record import record_from_environment
from zaya_jax.run.signals import NAMES, Listener, exit_status, ignore_signals, say_and_exit


def prepare_process() -> None:
    """Prepare output, signals and memory of this process; until its imports are done, a signal ends it with a sentence.

    During imports, Ctrl-C would end in a traceback or be swallowed.
    """
    prepare_streams()
    record = record_from_environment()  # a supervisor sees that a trainer has started, also if an import fails
    use_huge_pages()
    faulthandler.register(signal.SIGUSR1)  # prints the stacks of all threads, even of a process that hangs
    atexit.register(ignore_signals)  # exit handlers run in reverse order, so this one runs last

    def stop(number: int) -> None:
        sentence, status = f"Stopped by {NAMES[number]}.", exit_status(number)
        record.end(status, sentence, is_origin=True)
        say_and_exit(sentence, status)

    Listener(stop).__enter__()
