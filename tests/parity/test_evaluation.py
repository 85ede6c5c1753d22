"""lm-eval's tasks: our model answers as lm-eval's own model `hf` does, and the command on tasks and on bad input.

The tasks are local: their YAML and data are written here, and nothing reads the network.
"""

import json
import random

import jax
import numpy as np
import pytest
import tokenizers

pytestmark = [
    pytest.mark.parity,
    # Of datasets, lm-eval and torch, with no meaning here.
    pytest.mark.filterwarnings("ignore"),
]
lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")

from pathlib import Path  # noqa: E402

from tests.evaluate_helpers import write_tasks  # noqa: E402
from tests.helpers import random_model, tiny_config  # noqa: E402
from tests.train_helpers import WORDS  # noqa: E402
from zaya_jax.data.chat import DEFAULT_TEMPLATE  # noqa: E402
from zaya_jax.data.tokenizer import EOT_TEXT, train_tokenizer  # noqa: E402
from zaya_jax.errors import InputError  # noqa: E402
from zaya_jax.evaluate import harness, scoring  # noqa: E402
from zaya_jax.evaluate.__main__ import main  # noqa: E402
from zaya_jax.evaluate.lm_eval_model import ZayaLM  # noqa: E402
from zaya_jax.evaluate.suites import SuiteConfig, TaskConfig, load_suite, named_tasks  # noqa: E402
from zaya_jax.generate import decode  # noqa: E402
from zaya_jax.hf.exporter import save_pretrained  # noqa: E402

NAMES = "letters", "endings", "texts", "written"
SUITE = named_tasks(",".join(NAMES))
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def offline(tmp_path_factory):
    """Data sets are read from their files, and cached here."""
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        patch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
        patch.setenv("HF_ALLOW_CODE_EVAL", "0")
        patch.setattr(harness.load_tasks, "__kwdefaults__", {**harness.load_tasks.__kwdefaults__, "own_only": True})
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The tasks."""
    return write_tasks(tmp_path_factory.mktemp("tasks"), longest=60)


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    """A random model and a tokenizer that adds no token."""
    return write_model(tmp_path_factory.mktemp("export"), bos=False)


def write_model(path: Path, bos: bool) -> Path:
    save_pretrained(random_model(tiny_config(vocab_size=300, max_positions=128)), path)
    draw = random.Random(0)
    train_tokenizer([" ".join(draw.choices(WORDS, k=30)) + "0123456789" for _ in range(50)], 300).save(
        path / "tokenizer.json"
    )
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": bos, "eos_token": EOT_TEXT,
                "bos_token": EOT_TEXT, "pad_token": EOT_TEXT, "clean_up_tokenization_spaces": False}  # fmt: skip
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "chat_template.jinja").write_text(DEFAULT_TEMPLATE)
    (path / "generation_config.json").write_text(json.dumps({"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}))
    if bos:
        backend = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{EOT_TEXT} $A", special_tokens=[(EOT_TEXT, 0)]
        )
        backend.save(str(path / "tokenizer.json"))
    return path


def ours(path: Path, **options) -> ZayaLM:
    return ZayaLM(str(path), **{"tokens": 512, "rows": 16, **options})


def peer(path: Path, suite: SuiteConfig = SUITE):
    return harness.make_peer(str(path), suite, dtype="float32", rows=16)


def requests(folder: Path, suite: SuiteConfig = SUITE) -> dict[str, list]:
    """All requests of the tasks, by kind."""
    found: dict[str, list] = {}
    for task in harness.load_tasks(suite, folder=folder).tasks.values():
        task.build_all_requests(rank=0, world_size=1)
        for instance in task.instances:
            found.setdefault(instance.request_type, []).append(instance)
    return found


def largest_difference(asked, mine, theirs) -> float:
    """Of log-likelihoods; whether the answer is greedy must be the same."""
    left, right = mine.loglikelihood(asked), theirs.loglikelihood(asked)
    assert [greedy for _, greedy in left] == [greedy for _, greedy in right]
    return float(np.abs(np.array(left)[:, 0] - np.array(right)[:, 0]).max())


def test_every_kind_of_request_is_answered_as_by_transformers(folder, export, record_property):
    asked, mine, theirs = requests(folder), ours(export), peer(export)
    assert {kind: len(items) for kind, items in asked.items()} == {
        "loglikelihood": 480, "loglikelihood_rolling": 60, "generate_until": 60
    }  # fmt: skip
    lengths = [len(mine.tok_encode("".join(instance.args))) for instance in asked["loglikelihood"]]
    assert max(lengths) > mine.max_length + 1  # some are truncated
    worst = largest_difference(asked["loglikelihood"], mine, theirs)
    texts = np.array(mine.loglikelihood_rolling(asked["loglikelihood_rolling"]))
    rolling = np.abs(texts - theirs.loglikelihood_rolling(asked["loglikelihood_rolling"]))
    record_property("largest_difference", worst)
    print(f"largest difference: {worst:.2e} in 480 log-likelihoods, {rolling.max():.2e} in 60 texts of up to "
          f"{-texts.min():.0f} nats")  # fmt: skip
    assert worst < 1e-4
    assert (rolling / -texts).max() < 1e-6
    written = mine.generate_until(asked["generate_until"])
    assert written == theirs.generate_until(asked["generate_until"])
    assert len(set(written)) > 20


def test_a_tokenizer_that_adds_a_token_adds_it_here_too(folder, tmp_path):
    path = write_model(tmp_path, bos=True)
    asked, mine, theirs = requests(folder), ours(path), peer(path)
    assert mine.tok_encode("the") == [0, *mine.tok_encode("the", add_special_tokens=False)] == theirs.tok_encode("the")
    assert largest_difference(asked["loglikelihood"][::7], mine, theirs) < 1e-4
    assert mine.generate_until(asked["generate_until"][:9]) == theirs.generate_until(asked["generate_until"][:9])


def test_scores_of_tasks_are_the_same_and_need_few_compilations(folder, export):
    suite = SuiteConfig(tuple(TaskConfig(name, fewshot=1) for name in NAMES if name != "texts"), chat_template=True)
    results, programs = [], [scoring.score_batch, decode._prefill, decode._decode]
    jax.clear_caches()
    for chosen in (SUITE, suite):
        mine = ours(export)
        harness.score_tasks(mine, loaded := harness.load_tasks(chosen, folder=folder), seed=0)
        results.append(harness.score_tasks(ours(export), loaded, seed=0))
        theirs = harness.score_tasks(peer(export), loaded, seed=0)
        assert results[-1].keys() == theirs.keys()
        for name, result in theirs.items():
            assert results[-1][name].pop("metrics").keys() == result["metrics"].keys()
            assert results[-1][name] | {"metrics": result["metrics"]} == result
    compiled = {program.__name__: program._cache_size() for program in programs}
    print(compiled)
    assert 0 < sum(compiled.values()) <= 8


def test_samples_are_averaged_and_repeat(folder, export):
    suite = SuiteConfig((TaskConfig("written", samples=3, temperature=1.0, max_new_tokens=3), TaskConfig("letters")))
    loaded = harness.load_tasks(suite, folder=folder)
    first, model = harness.score_tasks(mine := ours(export), loaded, seed=0), ours(export)
    assert first == harness.score_tasks(model, loaded, seed=0)
    assert mine._written == model._written
    assert mine._written != ours(export, seed=1)._written
    assert (first["written"]["samples"], first["letters"]["samples"]) == (3, 1)
    texts: dict[str, set[str]] = {}
    for (context, _, _), text in mine._written.items():
        texts.setdefault(context, set()).add(text)
    assert len(mine._written) == 3 * 60
    assert sum(len(drawn) for drawn in texts.values()) > 2 * 60


def test_reasoning_is_not_part_of_an_answer(folder, export):
    asked = requests(folder, named_tasks("written"))["generate_until"][:16]
    plain = ours(export).generate_until(asked)
    model = ours(export)
    prompts = [model._prompt(*instance.args, 0)._replace(stop=()) for instance in asked]
    whole = [model.opened.tokenizer.decode(tokens, special=False) for tokens in model.writer.write(prompts)]
    end = max("abcdfghijklmnopqrstuvwxyz", key=lambda letter: sum(letter in text for text in whole))
    answers = ours(export, think_end=end).generate_until(asked)
    assert answers == [text.split(end)[-1].lstrip().split("e")[0].split("\n")[0] for text in whole]
    assert answers != plain


# --- the command -----------------------------------------------------------------------------------------------


def test_the_command_prints_and_writes_scores_next_to_a_peers(folder, export, tmp_path, capsys):
    (tmp_path / "suite.yaml").write_text("tasks: [{name: letters, fewshot: 2}, {name: written}]\nnot_covered: [Other]")
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
    assert len(record["fingerprint"]) == 32


@pytest.mark.parametrize(
    ("arguments", "said"),
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
    folder, export, tmp_path, arguments, said, capsys, monkeypatch
):
    write_tasks(tmp_path)
    head = (tmp_path / "letters.yaml").read_text()
    (tmp_path / "unsafe.yaml").write_text("unsafe_code: true\n" + head.replace("task: letters", "task: unsafe"))
    (tmp_path / "absent.yaml").write_text(head.replace("task: letters", "task: absent").replace(".jsonl", ".gone"))
    (tmp_path / "many.yaml").write_text("group: many\ntask: [letters, unsafe]\n")
    (tmp_path / "all.yaml").write_text("group: all\ntask: [letters, endings]\n")
    (tmp_path / "SAMPLED").write_text("tasks: [{name: letters, temperature: 1}]")
    (tmp_path / "GREEDY").write_text("tasks: [{name: written, samples: 3}]")
    monkeypatch.setattr("zaya_jax.evaluate.command.open_text_model", lambda *_: pytest.fail("It went on."))
    given = [str(tmp_path / text) if (tmp_path / text).suffix == "" and text.isupper() else text for text in arguments]
    folder_given = [] if "--task-folder" in given else ["--task-folder", str(tmp_path)]
    assert main([str(export), *given, *folder_given]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Error: ")]
    assert said in line


def test_a_missing_package_names_the_command_that_installs_it(export, capsys, monkeypatch):
    find = harness.importlib.util.find_spec
    for package, extra in (("lm_eval", "[evaluation]"), ("accelerate", "[evaluation,parity]")):
        monkeypatch.setattr(harness.importlib.util, "find_spec",
                            lambda name, gone=package: None if name == gone else find(name))  # fmt: skip
        assert main([str(export), "--tasks", "letters", "--peer", "hf:x"]) == 2
        assert f"pip install 'zaya-jax{extra}'" in capsys.readouterr().err


def test_a_setting_that_is_not_supported_is_named(export):
    with pytest.raises(InputError, match="sets num_return_sequences"):
        ours(export)._prompt("a", {"num_return_sequences": 2}, 0)
    model = ours(export)
    with pytest.raises(InputError, match="asks for 128 new tokens"):
        model.writer.write([model._prompt("a", {"max_gen_toks": 128}, 0)])


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
