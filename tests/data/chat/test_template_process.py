import json
import os
import subprocess
import sys

import pytest

from zaya_jax.data.chat import template_process
from zaya_jax.data.chat.template import Template, load_template
from zaya_jax.errors import InputError, RunStopped

GENERATION = "{% generation %}{{ messages[0].content }}{% endgeneration %}"


def render(template, content):
    return [piece.text for piece in template.render([{"role": "assistant", "content": content}], bos="", eos="")]


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% set n = messages | length %}{{ 'ab' * (n * 10 ** 10) }}", "needs more than 1,024 MiB of memory"),
        ("{% set n = messages | length %}{{ 'ab' | center(n * 10 ** 10) }}", "needs more than 1,024 MiB of memory"),
        ("{{ 'a' * (2 ** 24 + 1) }}", "writes more than 16,777,216 characters"),
    ],
)
def test_a_template_that_needs_too_much_is_stopped_and_the_next_one_runs(source, reason):
    default = load_template(None)
    before = render(default, "answer")
    with pytest.raises(ValueError, match=f"^the chat template fails: it {reason}$"):
        render(Template(source + GENERATION, "x"), "answer")
    assert render(default, "answer") == before


def test_a_conversation_too_long_for_the_process_is_refused(monkeypatch):
    monkeypatch.setattr(template_process, "LONGEST_REQUEST", 2**20)
    default = load_template(None)
    with pytest.raises(ValueError, match=r"^the chat template fails: its input is larger than 1 MiB as JSON$"):
        render(default, "a" * 2**20)
    assert "answer" in "".join(render(default, "answer"))


def test_a_template_that_cannot_be_compiled_in_time_is_refused_and_the_next_one_runs(monkeypatch):
    """The time for compiling is a part of that for rendering."""
    default = load_template(None)
    monkeypatch.setattr(template_process, "SECONDS", 1)
    with pytest.raises(InputError, match=r"^The chat template x cannot be compiled: it takes more than 1 s\.$"):
        Template("{{ 10 ** (10 ** 9) }}" + GENERATION, "x")
    assert "answer" in "".join(render(default, "answer"))


def test_an_interrupted_rendering_is_not_taken_for_the_next_one(monkeypatch):
    def interrupt(process, data):
        send(process, data)
        raise KeyboardInterrupt

    default, send = load_template(None), template_process._Runner._send
    with monkeypatch.context() as patch:
        patch.setattr(template_process._Runner, "_send", interrupt)
        with pytest.raises(KeyboardInterrupt):
            render(default, "first")
    assert "second" in "".join(render(default, "second"))


def test_a_process_that_was_killed_while_it_waited_is_started_again():
    default = load_template(None)
    before = render(default, "answer")
    process = template_process._runner(os.getpid())._process
    process.kill()
    process.wait()
    assert render(default, "answer") == before


def test_a_process_that_cannot_start_is_reported(monkeypatch):
    monkeypatch.setattr(template_process.sys, "executable", "/bin/false")
    with pytest.raises(
        RunStopped, match=r"cannot run: it ended with status 1\. Check that this command works: /bin/false -c"
    ):
        template_process._Runner().ask({"source": "", "renderings": [], "seconds": 1})


def test_a_request_that_cannot_be_parsed_in_the_limits_is_answered_and_so_is_the_next():
    """Many short messages stand for more memory than their text."""
    small = {"source": "{{ 1 }}", "renderings": [{"marks": ["", ""], "names": {}}], "seconds": 10}
    wide, deep = f"[{'{},' * 5_000_000}{{}}]", "[" * 100_000 + "]" * 100_000
    lines = [json.dumps(small).replace("{}", text) for text in (wide, deep, "{}")]
    command = ["sh", "-c", 'ulimit -v 300000; exec "$@"', "sh", sys.executable, "-P", template_process.__file__]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=True)
    too_wide, too_deep, answer = map(json.loads, done.stdout.splitlines())
    assert "needs more than 1,024 MiB of memory" in too_wide["error"]
    assert "recursion" in too_deep["error"]
    assert answer["texts"] == ["1"]
