"""Render chat templates in a process with limits on CPU time and memory.

Jinja's sandbox denies a template access to files and attributes, but does not stop endless loops or huge outputs. This
file is also the script of that process: each line of its stdin is one request. It imports nothing from its package, so
that the process starts quickly and needs little memory.
"""

import atexit
import datetime
import functools
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

SECONDS = 10  # maximum CPU time per request
MEMORY = 2**30  # bytes of address space, including Python's own
LONGEST_REQUEST = 2**27  # bytes; parsing it takes several times as much memory
LONGEST_TEXT = 2**24  # maximum characters of a rendering


def run_template(source: str, renderings: list[dict[str, Any]]) -> dict[str, Any]:
    """Compile a template and render it.

    Each rendering has the `marks` to put around generated text, the `names` that the template can use, and optionally
    the time `now` in seconds, with which `strftime_now` is one of them.

    Return `texts`, one per rendering, and `has_generation`; after an error its message as `error`, with the `line` of a
    wrong syntax. `ValueError` if these are not JSON, `RunStopped` if the process cannot be started.
    """
    return _runner(os.getpid()).ask({"source": source, "renderings": renderings, "seconds": SECONDS})


@functools.lru_cache(maxsize=1)
def _runner(process: int) -> "_Runner":
    del process  # part of the cache key: a forked process must not share its parent's pipes
    return _Runner()


class _Runner:
    """A process that is started on first use, and again after a template exceeded its limits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self._close)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        data = json.dumps(request).encode() + b"\n"
        if len(data) > LONGEST_REQUEST:
            return {"error": f"its input is larger than {LONGEST_REQUEST // 2**20} MiB as JSON"}
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self._close()  # it was killed between requests, so no template is the cause
            try:
                answer = self._send(data)
            except BaseException:  # after Ctrl-C, the pending answer must not be read as that of the next request
                self._close()
                raise
            if answer.endswith(b"\n"):
                return json.loads(answer)
            status = self._close()
        if status == -signal.SIGXCPU:
            return {"error": f"it takes more than {request['seconds']} s"}
        if status < 0:
            name = signal.Signals(-status).name
            return {"error": f"its process was ended by {name}, perhaps because it ran out of memory"}
        from zaya_jax.errors import RunStopped

        advice = f"Check that this command works: {sys.executable} -c 'import jinja2'."
        raise RunStopped(f"The chat template process cannot run: it ended with status {status}. {advice}")

    def _send(self, data: bytes) -> bytes:
        """Return the answer to a request, empty if the process has ended."""
        if self._process is None:
            # A new session, so that Ctrl-C reaches only the parent. -P, so that modules next to the script do not
            # shadow those that it imports.
            command, pipe = [sys.executable, "-P", __file__], subprocess.PIPE
            self._process = subprocess.Popen(  # noqa: S603 - this file
                command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True
            )
        stdin: Any = self._process.stdin
        stdout: Any = self._process.stdout
        with suppress(BrokenPipeError):
            stdin.write(data)
            stdin.flush()
        return stdout.readline()

    def _close(self) -> int:
        process, self._process = self._process, None
        if process is None:
            return 0
        for pipe in (process.stdout, process.stdin):
            with suppress(BrokenPipeError):
                pipe.close()  # pyright: ignore[reportOptionalMemberAccess]
        try:
            return process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


class _Generation(Extension):
    """The block `{% generation %}…{% endgeneration %}`, which has its own scope, as in transformers."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it as a class attribute

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        if any(node.find(nodes.ExtensionAttribute) for node in body):
            parser.fail("generation blocks must not be nested", line)
        return nodes.CallBlock(self.call_method("_surround"), [], [], body).set_lineno(line)

    def _surround(self, caller: Callable[[], str]) -> str:
        begin, end = self.environment.globals["generation_marks"]
        return f"{begin}{caller()}{end}"


def _to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:  # as in transformers
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


@functools.lru_cache(maxsize=4)
def _compile(source: str, marks: tuple[str, str]) -> tuple[jinja2.Template, bool]:
    """Compile a template; also return whether it has a generation block."""
    # The environment of transformers, without the clock and random numbers, so that renderings are reproducible.
    extensions = [_Generation, loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "generation_marks": marks}
    del environment.filters["random"], environment.globals["lipsum"]
    has_generation = environment.parse(source).find(nodes.ExtensionAttribute) is not None
    return environment.from_string(source), has_generation


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the renderings of a request, or an error; see `run_template`."""
    try:
        _, has_generation = _compile(request["source"], ("", ""))
    except jinja2.TemplateSyntaxError as error:
        return {"error": _message(error), "line": error.lineno}
    except Exception as error:  # Python can reject the code that Jinja generates
        return {"error": _message(error)}
    texts = []
    for rendering in request["renderings"]:
        names = rendering["names"]
        if "now" in rendering:  # not in data, where the date may not be written
            names["strftime_now"] = datetime.datetime.fromtimestamp(rendering["now"]).astimezone().strftime
        try:
            text = _compile(request["source"], tuple(rendering["marks"]))[0].render(names)
        except Exception as error:  # a template can raise anything
            return {"error": _message(error)}
        if len(text) > LONGEST_TEXT:
            return {"error": f"it writes more than {LONGEST_TEXT:,} characters"}
        texts.append(text)
    return {"texts": texts, "has_generation": has_generation}


def _message(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"it needs more than {MEMORY // 2**20:,} MiB of memory"
    return (error.message if isinstance(error, jinja2.TemplateError) else str(error)) or type(error).__name__


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def _reply(line: bytes) -> str:
    """Answer a request as JSON; what it needs is free again afterwards."""
    try:
        request = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + request["seconds"])
        return json.dumps(_answer(request))
    except (MemoryError, RecursionError) as error:
        return json.dumps({"error": _message(error)})


def main() -> None:
    """Answer requests until stdin ends. A request over its CPU time ends the process with SIGXCPU."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, MEMORY)
    for line in sys.stdin.buffer:
        print(_reply(line), flush=True)


if __name__ == "__main__":
    main()
