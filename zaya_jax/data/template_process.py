"""A process that runs chat templates, a request a line: what a template may take is limited by the system.

Jinja's sandbox keeps a template from files and attributes, but not from loops without end or texts of terabytes. This
file is run as a script and imports nothing of its package, so that it starts quickly and needs little memory.
"""

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

MEMORY = 2**30  # bytes of address space, Python's own included
LONGEST = 2**24  # characters of a rendering


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}`: its inside, with a scope of its own as in transformers."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Read the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        if any(node.find(nodes.ExtensionAttribute) for node in body):
            parser.fail("generation blocks must not be nested", line)
        return nodes.CallBlock(self.call_method("_surround"), [], [], body).set_lineno(line)

    def _surround(self, caller: Callable[[], str]) -> str:
        begin, end = self.environment.globals["generation_marks"]
        return f"{begin}{caller()}{end}"


def _environment(marks: tuple[str, str]) -> ImmutableSandboxedEnvironment:
    # What transformers renders with, less what differs from one time to the next.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
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
    """The template, and whether it marks anything as generated."""
    environment = _environment(marks)
    has_generation = environment.parse(source).find(nodes.ExtensionAttribute) is not None
    return environment.from_string(source), has_generation


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """The renderings of a request, or what went wrong.

    A request has the template's `source` and a list of `renderings`, each with its `marks` of generated text and the
    `names` that the template sees. Without any, the template is compiled alone.
    """
    try:
        _, has_generation = _compile(request["source"], ("", ""))
    except jinja2.TemplateSyntaxError as error:
        return {"syntax": _message(error), "line": error.lineno}
    except Exception as error:  # from Python, about what Jinja makes of the source
        return {"compile": _message(error)}
    texts = []
    for rendering in request["renderings"]:
        try:
            template, _ = _compile(request["source"], tuple(rendering["marks"]))
            text = template.render(rendering["names"])
        except Exception as error:  # a template can raise anything
            return {"render": _message(error)}
        if len(text) > LONGEST:
            return {"render": f"it writes more than {LONGEST:,} characters"}
        texts.append(text)
    return {"texts": texts, "has_generation": has_generation}


def _message(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return f"it needs more than {MEMORY // 2**20:,} MiB of memory"
    return (error.message if isinstance(error, jinja2.TemplateError) else str(error)) or type(error).__name__


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))


def main() -> None:
    """Answer requests until there are no more; end by SIGXCPU at one that takes too many seconds."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's to answer
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, MEMORY)
    for line in sys.stdin.buffer:
        request = json.loads(line)
        used = resource.getrusage(resource.RUSAGE_SELF)
        _limit(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + 1 + request["seconds"])
        try:
            answer = json.dumps(_answer(request))
        except MemoryError as error:
            answer = json.dumps({"render": _message(error)})
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
