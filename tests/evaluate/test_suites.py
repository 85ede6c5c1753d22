"""Suites of tasks: the files that are shipped, and mistakes in others."""

from pathlib import Path

import pytest

from zaya_jax.errors import InputError
from zaya_jax.evaluate.harness import load_suite, named_tasks

SUITES = sorted((Path(__file__).parents[2] / "configs" / "evals").glob("*.yaml"))


@pytest.mark.parametrize("path", SUITES, ids=lambda path: path.stem)
def test_the_shipped_suites_have_the_sampling_of_the_paper(path):
    suite = load_suite(path)
    drawn = {(task.samples, task.temperature, task.top_p, task.top_k) for task in suite.tasks}
    assert (
        drawn
        == {
            "base": {(1, None, None, None)},
            "reasoning": {(16, 1.0, 0.95, 0), (1, 1.0, 0.95, 0)},
            "maths": {(64, 1.0, 0.95, 0)},
            "code": {(16, 0.6, 0.95, 20)},
        }[path.stem]
    )
    assert (path.stem == "base") != bool(suite.not_covered)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tasks: []", "tasks is .* at least one task"),
        ("tasks: [{name: a}, {name: a}]", "tasks is 'a'.* once"),
        ("tasks: [{name: ' '}]", "name is ' '"),
        ("tasks: [{nam: a}]", r"tasks\.0\.nam is unknown. Did you mean tasks\.0\.name"),
        ("tasks: [{}]", "tasks.0.name must be set"),
        ("run_dir: runs/a", r"The key run_dir is unknown\. Allowed keys: tasks"),  # of a configuration for training
        ("task: [{name: a}]", "key task is unknown. Did you mean tasks"),
        ("tasks: [{name: a, samples: 0}]", "tasks.a.samples is 0"),
        ("tasks: [{name: a, samples: 2, temperature: 0}]", "tasks.a.temperature is 0.0.*samples is 2"),
        ("tasks: [{name: a, fewshot: -1}]", "tasks.a.fewshot is -1"),
        ("tasks: [{name: a, top_p: 2}]", "tasks.a.top_p is 2"),
        ("tasks: [{name: a, top_k: x}]", "tasks.a.top_k is 'x'"),
        ("tasks: [{name: a, max_new_tokens: 0}]", "tasks.a.max_new_tokens is 0"),
        ("{tasks: [{name: a}], think_end: ''}", "think_end is ''"),
        ("{tasks: [{name: a}], not_covered: x}", "not_covered is 'x'"),
        ("- a", "is a list"),
        ("tasks: !!python/object:os.system {}", "not valid YAML"),
    ],
)
def test_a_mistake_in_a_suite_names_the_key(tmp_path, text, message):
    path = tmp_path / "suite.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        load_suite(path)


def test_tasks_are_named_on_the_command_line():
    assert [task.name for task in named_tasks("a, b").tasks] == ["a", "b"]
    for names in ("a,,b", "a,b,a", ""):
        with pytest.raises(InputError, match=f"--tasks is '{names}', but must be names of tasks .* each name once"):
            named_tasks(names)


def test_a_suite_replaces_values_of_a_tasks_own(tmp_path):
    path = tmp_path / "suite.yaml"
    path.write_text("tasks: [{name: a, temperature: 0.6, top_k: 20, max_new_tokens: 5}, {name: b, temperature: 0}]")
    first, second = load_suite(path).tasks
    assert first.generation == {"do_sample": True, "temperature": 0.6, "top_k": 20, "max_gen_toks": 5}
    assert second.generation == {"do_sample": False, "temperature": 0}
