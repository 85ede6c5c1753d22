"""Render chat templates in a process with limits on CPU time and memory. Each line of stdin is one request.

Jinja's sandbox denies a template access to files and attributes, but does not stop endless loops or huge outputs. This
file runs as a script and imports nothing from its package, so that it starts quickly and needs little memory.
"""

import datetime
import json
import resource
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MEMORY = 2**30  # bytes of address space, including Python's own
LONGEST = 2**24  # maximum characters of a rendering


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


def _environment(marks: tuple[str, str]) -> ImmutableSandboxedEnvironment:
    # The environment of transformers, without the clock and random numbers, so that renderings are reproducible.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[_Generation, loopcontrols])  # fmt: skip
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["generation_marks"] = marks
    del environment.filters["random"], environment.globals["lipsum"]
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:  # fmt: skip
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


@lru_cache(maxsize=4)
def _compile(source: str, marks: tuple[str, str]) -> tuple[jinja2.Template, bool]:
    """Compile a template; also return whether it has a generation block."""
    environment = _environment(marks)
    has_generation = environment.parse(source).find(nodes.ExtensionAttribute) is not None
    return environment.from_string(source), has_generation


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """Return the renderings of a request, or an error.

    A request has the template's `source` and a list of `renderings`. Each rendering has the `marks` to put around
    generated text, the `names` that the template can use, and the time `now` in seconds if it may write the date. With
    an empty list, the template is only compiled.
    """
    try:
        _, has_generation = _compile(request["source"], ("", ""))
    except jinja2.TemplateSyntaxError as error:
        return {"syntax": _message(error), "line": error.lineno}
    except Exception as error:  # Python can reject the code that Jinja generates
        return {"compile": _message(error)}
    texts = []
    for rendering in request["renderings"]:
        try:
            template, _ = _compile(request["source"], tuple(rendering["marks"]))
            text = template.render(rendering["names"] | _clock(rendering))
        except Exception as error:  # a template can raise anything
            return {"render": _message(error)}
        if len(text) > LONGEST:
            return {"render": f"it writes more than {LONGEST:,} characters"}
        texts.append(text)
    return {"texts": texts, "has_generation": has_generation}


def _clock(rendering: dict[str, Any]) -> dict[str, Any]:
    """Return `strftime_now`, as in transformers, where the date may be written: not into data."""
    if "now" not in rendering:
        return {}
    return {"strftime_now": datetime.datetime.fromtimestamp(rendering["now"]).astimezone().strftime}


def _message(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"it needs more than {MEMORY // 2**20:,} MiB of memory"
    return (error.message if isinstance(error, jinja2.TemplateError) else str(error)) or type(error).__name__


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def main() -> None:
    """Answer requests until stdin ends. A request over its CPU time ends the process with SIGXCPU."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, MEMORY)
    for line in sys.stdin.buffer:
        sys.stdout.write(_reply(line) + "\n")
        sys.stdout.flush()


def _reply(line: bytes) -> str:
    """Answer a request as JSON; what it needs is free again afterwards."""
    try:
        request = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + request["seconds"])
        return json.dumps(_answer(request))
    except (MemoryError, RecursionError) as error:
        return json.dumps({"render": _message(error)})


if __name__ == "__main__":
    main()
