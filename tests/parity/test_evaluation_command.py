"""The command on lm-eval's tasks: what it prints and writes, and how it refuses bad input."""

import json
import re
import shutil
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.parity,
    # Of datasets, lm-eval and torch, with no meaning here.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("offline"),
]
pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")

from tests.evaluate_helpers import write_tasks  # noqa: E402
from tests.parity.evaluation_helpers import TEMPLATE  # noqa: E402
from zaya_jax.errors import InputError  # noqa: E402
from zaya_jax.evaluate import harness  # noqa: E402
from zaya_jax.evaluate.__main__ import main  # noqa: E402
from zaya_jax.evaluate.harness import load_suite  # noqa: E402

ROOT = Path(__file__).parents[2]


def test_the_command_prints_and_writes_scores_next_to_a_peers(folder, export, tmp_path, capsys):
    (tmp_path / "suite.yaml").write_text("tasks: [{name: letters, fewshot: 2}, {name: written}]\n"
                                         "chat_template: true\nnot_covered: [Other]")  # fmt: skip
    output = tmp_path / "scores.json"
    arguments = [str(export), "--config", str(tmp_path / "suite.yaml"), "--task-folder", str(folder), "--limit", "20",
                 "--output", str(output)]  # fmt: skip
    assert main([*arguments, "--peer", f"hf:{export}"]) == 0
    printed = capsys.readouterr().out
    assert "not covered by lm-eval: Other" in printed
    (line,) = [line.split() for line in printed.splitlines() if line.startswith("letters") and " acc " in line]
    assert line[1:3] == ["3.0", "2"]
    record = json.loads(output.read_text())
    letters = record["tasks"]["letters"]
    assert letters == record["peers"][f"hf:{export}"]["letters"]
    assert (letters["version"], letters["fewshot"], letters["items"], len(letters["prompts"])) == (3.0, 2, 20, 64)
    assert record["not_covered"] == ["Other"]
    assert record["versions"]["lm_eval"] == "0.4.13"
    assert record["settings"]["limit"] == 20
    assert record["truncated"]["letters"]["requests"] > 0
    assert len(record["fingerprint"]) == 32


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "leters"], "'leters' is unknown to the installed lm-eval. Did you mean letters"),
        (["--tasks", "unsafe"], "unsafe executes code"),
        (["--tasks", "many"], "unsafe executes code"),
        (["--tasks", "absent"], "The task absent cannot be loaded"),
        (["--tasks", "letters,all"], "The task letters is in all and in letters"),
        (["--tasks", "letters", "--peer", "Qwen/Qwen3-4B"], "--peer is 'Qwen/Qwen3-4B'"),
        (["--tasks", "letters", "--task-folder", "nowhere"], "--task-folder is 'nowhere'"),
        (["--config", "SAMPLED"], "tasks.letters must not set"),
        (["--config", "GREEDY"], "tasks.written.samples is 3"),
    ],
)
def test_a_bad_task_is_one_sentence_before_anything_is_compiled(
    folder, export, tmp_path, arguments, message, capsys, monkeypatch
):
    write_tasks(tmp_path)
    head = (tmp_path / "letters.yaml").read_text()
    (tmp_path / "unsafe.yaml").write_text("unsafe_code: true\n" + head.replace("task: letters", "task: unsafe"))
    (tmp_path / "absent.yaml").write_text(head.replace("task: letters", "task: absent").replace(".jsonl", ".gone"))
    (tmp_path / "many.yaml").write_text("group: many\ntask: [letters, unsafe]\n")
    (tmp_path / "all.yaml").write_text("group: all\ntask: [letters, endings]\n")
    (tmp_path / "SAMPLED").write_text("tasks: [{name: letters, temperature: 1}]")
    (tmp_path / "GREEDY").write_text("tasks: [{name: written, samples: 3}]")
    monkeypatch.setattr("zaya_jax.evaluate.evaluate_command.open_text_model", lambda *_: pytest.fail("It went on."))
    paths = [str(tmp_path / text) if text.isupper() else text for text in arguments]
    tasks = [] if "--task-folder" in paths else ["--task-folder", str(tmp_path)]
    assert main([str(export), *paths, *tasks]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Error: ")]
    assert message in line


def test_a_missing_package_names_the_command_that_installs_it(export, capsys, monkeypatch):
    find = harness.importlib.util.find_spec
    for package, extra in (("lm_eval", "[evaluation]"), ("accelerate", "[evaluation,parity]")):
        monkeypatch.setattr(harness.importlib.util, "find_spec",
                            lambda name, gone=package: None if name == gone else find(name))  # fmt: skip
        assert main([str(export), "--tasks", "letters", "--peer", "hf:x"]) == 2
        assert f"pip install 'zaya-jax{extra}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("suite", "generation", "template", "message"),
    [
        ("{name: written}", "num_return_sequences: 2", TEMPLATE, "The task written sets num_return_sequences"),
        ("{name: written}", "repetition_penalty: 0.0, do_sample: true", TEMPLATE,
         "The task written's repetition_penalty is 0.0"),
        ("{name: written}", "num_beams: 4", TEMPLATE, "The task written's num_beams is 4, but must be 1"),
        ("{name: written, max_new_tokens: 128}", "do_sample: false", TEMPLATE,
         "The task written asks for 128 new tokens, but must ask for at least 1 and fewer than the model's 128"),
        ("{name: letters}", "", "{{ raise_exception('no users') }}", "cannot render the conversation: .*no users"),
    ],
)  # fmt: skip
def test_a_task_that_cannot_be_answered_is_one_sentence_before_scoring(
    export, tmp_path, suite, generation, template, message, capsys, monkeypatch
):
    folder, model = write_tasks(tmp_path / "tasks", items=3), tmp_path / "model"
    path = folder / "written.yaml"
    path.write_text(path.read_text().replace("do_sample: false", generation))
    shutil.copytree(export, model)
    (model / "chat_template.jinja").write_text(template)
    (tmp_path / "suite.yaml").write_text(f"tasks: [{suite}]\nchat_template: true")
    (tmp_path / "text").write_text("the model")
    for name in ("harness.score_tasks", "evaluate_command.text_losses"):
        monkeypatch.setattr(f"zaya_jax.evaluate.{name}", lambda *_, **__: pytest.fail("It went on."))
    assert main([str(model), "--config", str(tmp_path / "suite.yaml"), "--task-folder", str(folder), "--text",
                 str(tmp_path / "text")]) == 2  # fmt: skip
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Error: ")]
    assert re.search(message, line)


@pytest.mark.parametrize(
    ("text", "template", "message"),
    [
        ("{{question}}", "{% if messages[0].content[:2] == '1 ' %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE,
         "The chat template .*cannot render the conversation: .*no"),
        ("{{question.words() if question[:2] == '1 ' else question}}", TEMPLATE, "UndefinedError: .*words"),
    ],
)  # fmt: skip
def test_an_error_while_requests_are_made_names_the_task(export, tmp_path, text, template, message, capsys):
    folder, model = write_tasks(tmp_path / "tasks", items=3), tmp_path / "model"
    path = folder / "endings.yaml"
    path.write_text(path.read_text().replace("{{question}}", text))
    shutil.copytree(export, model)
    (model / "chat_template.jinja").write_text(template)
    (tmp_path / "suite.yaml").write_text("tasks: [{name: endings}]\nchat_template: true")
    assert main([str(model), "--config", str(tmp_path / "suite.yaml"), "--task-folder", str(folder)]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Error: ")]
    assert re.search(f"Error: The requests of the task endings cannot be made. {message}", line)


def test_the_installed_lm_eval_has_all_tasks_of_the_shipped_suites():
    from lm_eval.tasks import TaskManager

    index = TaskManager().task_index
    suites = {path.stem: load_suite(path) for path in (ROOT / "configs" / "evals").glob("*.yaml")}
    for suite in suites.values():
        for task in suite.tasks:
            harness._check_task(task.name, index, runs_code=True)
    for name in ("humaneval", "humaneval_instruct", "mbpp_instruct"):
        with pytest.raises(InputError, match="--run-generated-code"):
            harness._check_task(name, index, runs_code=False)
