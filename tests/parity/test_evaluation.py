"""lm-eval's tasks: our model answers as lm-eval's own model `hf` does.

The tasks are local: their YAML and data are written here, and nothing reads the network.
"""

import json
import re
from collections import Counter

import jax
import numpy as np
import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytestmark = [
    pytest.mark.parity,
    # Of datasets, lm-eval and torch, with no meaning here.
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("offline"),
]
lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")

from pathlib import Path  # noqa: E402

from lm_eval.api.instance import Instance  # noqa: E402

from tests.evaluate_helpers import write_tasks  # noqa: E402
from tests.parity.evaluation_helpers import TEMPLATE, write_model  # noqa: E402
from tests.train_helpers import WORDS  # noqa: E402
from zaya_jax.data.chat.template import DEFAULT_TEMPLATE  # noqa: E402
from zaya_jax.data.tokenizer import EOT_TEXT, Tokenizer  # noqa: E402
from zaya_jax.errors import InputError  # noqa: E402
from zaya_jax.evaluate import harness, scoring  # noqa: E402
from zaya_jax.evaluate.__main__ import main  # noqa: E402
from zaya_jax.evaluate.harness import SuiteConfig, TaskConfig, named_tasks  # noqa: E402
from zaya_jax.evaluate.lm_eval_model import ZayaLM  # noqa: E402
from zaya_jax.evaluate.scoring import Request  # noqa: E402
from zaya_jax.generate import engine, steps  # noqa: E402
from zaya_jax.generate.sampling import Sampling  # noqa: E402
from zaya_jax.run.signals import warn_once  # noqa: E402

NAMES = "letters", "endings", "texts", "written"
SUITE = named_tasks(",".join(NAMES))


def ours(path: Path, **options) -> ZayaLM:
    return ZayaLM(str(path), **{"tokens": 512, "rows": 16, **options})


def peer(path: Path, suite: SuiteConfig = SUITE):
    return harness.make_peer(str(path), suite, dtype="float32", rows=16)


def requests(folder: Path, suite: SuiteConfig = SUITE) -> dict[str, list]:
    """All requests of the tasks, by kind."""
    kinds: dict[str, list] = {}
    for task in harness.load_tasks(suite, folder=folder).tasks.values():
        task.build_all_requests(rank=0, world_size=1)
        for instance in task.instances:
            kinds.setdefault(instance.request_type, []).append(instance)
    return kinds


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


# --- requests at the edge --------------------------------------------------------------------------------------

EDGES = st.text("thew aro\n\t é☃") | st.lists(st.sampled_from(["the", " model", EOT_TEXT, "  "])).map("".join)


def request(kind: str, *arguments) -> Instance:
    return Instance(kind, {}, arguments, 0, metadata=("task", 0, 1))


def split_by(theirs, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """The tokens that lm-eval's own model would score; none for a request at which it fails."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theirs, "_loglikelihood_tokens", lambda asked, **_: [asked[0][1:]])
        try:
            return theirs.loglikelihood([request("loglikelihood", context, continuation)], disable_tqdm=True)[0]
        except IndexError:
            return [], []


@pytest.fixture(scope="module", params=[False, True], ids=["without bos", "with bos"])
def both(request, tmp_path_factory):
    path = write_model(tmp_path_factory.mktemp("model"), bos=request.param)
    return ours(path), peer(path)


@given(context=EDGES, continuation=EDGES)
@example("", EOT_TEXT)
@example("t", "he")
@example("  ", "the")
@settings(max_examples=200)
def test_texts_are_split_as_by_transformers_and_where_that_fails_there_are_tokens_still(both, context, continuation):
    mine, theirs = both
    before, after = split_by(theirs, context, continuation)
    if before and after:
        assert mine._encode_pair(context, continuation) == (before, after)
    elif mine.tok_encode(context[len(context.rstrip()) :] + continuation, add_special_tokens=False):
        before, after = mine._encode_pair(context, continuation)
        assert before
        assert after
    else:
        with pytest.raises(InputError, match="its continuation has 0 tokens, but must have 1 to 128"):
            mine._encode_pair(context, continuation)


def test_a_token_over_the_join_is_scored_as_the_continuation_alone(export):
    model = ours(export)
    word = next(word for word in WORDS if len(model.tok_encode(word)) == 1)
    split = [(word[:end], word[end:]) for end in range(1, len(word))]
    scores = model.loglikelihood([request("loglikelihood", *texts) for texts in split])
    alone = [Request(model.tok_encode(before), model.tok_encode(after)) for before, after in split]
    assert scores == [pytest.approx(tuple(score), rel=1e-5) for score in model.scorer.score(alone)]


HALF = "the model\ud800"


@pytest.mark.parametrize(
    ("kind", "good", "bad", "message"),
    [
        ("loglikelihood", ("the", " row"), ("the rows\x1b", ""), r"'the rows\\x1b': its continuation has 0 tokens"),
        ("loglikelihood", ("the", " row"), ("the", "é☃" * 99), r"☃': its continuation has 495 tokens, .* 128"),
        ("loglikelihood", ("", "row"), ("", ""), "'': its continuation has 0 tokens"),
        ("loglikelihood_rolling", ("the row",), (HALF,), r"'the model\\ud800': .* position 9"),
        ("generate_until", ("the", {"max_gen_toks": 3}), (HALF, {"max_gen_toks": 3}), r"model\\ud800': .* position 9"),
        ("generate_until", ("the", {"max_gen_toks": 3}), ("row", {"max_gen_toks": 128}), "'row': .*128 new tokens"),
    ],
)
def test_a_request_that_cannot_be_answered_is_named_and_the_others_are_answered(export, kind, good, bad, message):
    model = ours(export)
    answer = getattr(model, kind)
    [expected] = answer([request(kind, *good)])
    with pytest.raises(InputError, match=f"^The task task has a request that cannot be answered, .*{message}"):
        answer([request(kind, *bad)])
    model.failed = {}
    values = answer([request(kind, *arguments) for arguments in (bad, good, bad)])
    assert values[1] == (pytest.approx(expected, rel=1e-5) if kind != "generate_until" else expected)
    for value in (values[0], values[2]):
        assert value == "" if kind == "generate_until" else not np.isfinite(value).all()
    assert list(model.failed) == ["task"]
    assert all(re.search(message, sentence) for sentence in model.failed["task"])


def test_texts_without_tokens_and_prompts_beyond_the_positions_have_answers(export):
    model, theirs = ours(export), peer(export)
    assert model.loglikelihood_rolling([request("loglikelihood_rolling", "")]) == [0.0]
    assert theirs.loglikelihood_rolling([request("loglikelihood_rolling", "")]) == [0]
    long = request("generate_until", "the model reads a row " * 60, {"until": ["\n"], "max_gen_toks": 9})
    assert len(model.tok_encode(long.args[0])) > 128
    assert model.generate_until([long]) == theirs.generate_until([long])


def test_requests_that_lose_their_beginning_are_counted_and_told_once_for_each_task(folder, export, capsys):
    asked, model, theirs = requests(folder), ours(export), peer(export)
    warn_once.cache_clear()
    model.loglikelihood(asked["loglikelihood"])
    model.generate_until(asked["generate_until"])
    expected: dict[str, Counter] = {}
    for instance in asked["loglikelihood"]:
        cut = sum(map(len, theirs._encode_pair(*instance.args))) - 1 - theirs.max_length
        expected.setdefault(instance.task_name, Counter()).update(requests=cut > 0, tokens=max(cut, 0))
    for instance in asked["generate_until"]:
        cut = len(theirs.tok_encode(instance.args[0])) - (theirs.max_length - 12)
        expected.setdefault(instance.task_name, Counter()).update(requests=cut > 0, tokens=max(cut, 0))
    assert model.truncated == expected
    assert expected.keys() == {"letters", "endings", "written"}
    output = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Warning: ")]
    for task, line in zip(expected, output, strict=True):
        requests_cut, tokens = expected[task].values()
        assert f" {requests_cut} request" in line
        assert f" of the task {task} did not fit " in line
        assert f" {tokens:,} token" in line


JSON = st.recursive(st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.floats() | st.text(max_size=3),
                    lambda value: st.lists(value, max_size=3) | st.dictionaries(st.text(max_size=3), value, max_size=2),
                    max_leaves=3)  # fmt: skip


@given(key=st.sampled_from(["until", "num_beams", "do_sample", "max_gen_toks", "max_tokens", *Sampling._fields, "x"]),
       value=JSON)  # fmt: skip
@example(key="until", value=None)
@example(key="num_beams", value=4)
def test_a_setting_of_any_value_is_followed_or_refused_with_its_task_and_its_name(both, key, value):
    prompt, message = None, ""
    try:
        prompt = both[0]._prompt("written", "a", {"do_sample": True, key: value}, 0)
    except InputError as error:
        message = str(error)
    if prompt is None:
        assert "The task written" in message
        assert key in message or "new token" in message  # how many, whatever the name of the setting is
        return
    assert key != "x"
    if key == "until":
        assert prompt.stop == tuple(filter(None, [value] if isinstance(value, str) else value or ()))
    elif key in Sampling._fields and value is not None:
        assert getattr(prompt.sampling, key) == value


def test_a_task_with_such_a_request_has_no_score_and_the_others_have_theirs(folder, export, tmp_path, capsys):
    tasks = write_tasks(tmp_path / "tasks", items=5)
    items = [json.loads(line) for line in (tasks / "items.jsonl").read_text().splitlines()]
    items[3] |= {"question": "which\tends", "endings": [f" {word}☃" for word in "abc"] + [""]}
    (tasks / "holes.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    text = (tasks / "endings.yaml").read_text()
    text = text.replace("task: endings", "task: holes").replace("items.jsonl", "holes.jsonl")
    (tasks / "holes.yaml").write_text(f'{text}target_delimiter: ""\n')
    (tasks / "all.yaml").write_text("group: all\ntask: [letters, holes]\naggregate_metric_list: [{metric: acc}]\n")
    output = tmp_path / "scores.json"
    asked = [str(export), "--task-folder", str(tasks), "--output", str(output), "--tasks"]
    assert main([*asked, "letters"]) == 0
    letters = json.loads(output.read_text())["tasks"]["letters"]
    assert main([*asked, "all", "--peer", f"hf:{export}"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("Stopped: ")]
    message = r"The task holes has a request that cannot be answered, 'which\tends': its continuation has 0 tokens"
    assert message in line
    assert f"--peer hf:{export} could not be scored. AssertionError" in line
    record = json.loads(output.read_text())
    assert record["tasks"].keys() == {"letters", "holes"}
    assert record["tasks"]["letters"] == letters
    assert record["tasks"]["holes"]["metrics"] == {}
    assert message in record["tasks"]["holes"]["failed"][0]
    assert "peers" not in record


def assert_same_scores(mine, theirs):
    """The same tasks, prompts and metrics, and equal values up to rounding."""
    assert mine.keys() == theirs.keys()
    for name, result in theirs.items():
        own, other = mine[name]["metrics"], result["metrics"]
        assert mine[name] | {"metrics": other} == result
        assert own.keys() == other.keys()
        for metric, score in other.items():
            close = {key: pytest.approx(value, rel=1e-4) for key, value in score.items() if value is not None}
            assert own[metric] == score | close, metric


def test_scores_of_tasks_are_the_same_and_need_few_compilations(folder, export, monkeypatch):
    chat = [
        SuiteConfig(tuple(TaskConfig(name, fewshot) for name in NAMES if name != "texts"), chat_template=True)
        for fewshot in (0, 1)
    ]
    made = set()

    def make_programs(*model):
        made.add(steps.make_programs(*model))
        return steps.make_programs(*model)

    monkeypatch.setattr(engine, "make_programs", make_programs)
    jax.clear_caches()
    for suite in (SUITE, *chat):
        loaded = harness.load_tasks(suite, folder=folder)
        mine = harness.score_tasks(ours(export), loaded, seed=0)
        assert_same_scores(mine, harness.score_tasks(peer(export), loaded, seed=0))
    (programs,) = made  # of all models, which differ in nothing
    compiled = [program._cache_size() for program in (scoring.score_batch, *programs)]
    print(compiled)
    assert 0 < sum(compiled) <= 8


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
    prompts = [model._prompt("written", *instance.args, 0)._replace(stop=()) for instance in asked]
    whole = [model.opened.tokenizer.decode(tokens, special=False) for tokens in model.writer.write(prompts)]
    end = max("abcdfghijklmnopqrstuvwxyz", key=lambda letter: sum(letter in text for text in whole))
    answers = ours(export, think_end=end).generate_until(asked)
    assert answers == [text.split(end)[-1].lstrip().split("e")[0].split("\n")[0] for text in whole]
    assert answers != plain


@pytest.mark.parametrize(
    ("settings", "sampling"),
    [
        ({"do_sample": False, "temperature": 0.7, "top_p": 0.5}, Sampling()),
        ({"repetition_penalty": 1.2}, Sampling(repetition_penalty=1.2)),
        ({"temperature": 0.7, "top_k": 3}, Sampling(0.7, top_k=3)),
        ({"do_sample": True, "min_p": None}, Sampling(1.0)),
    ],
)
def test_settings_of_a_task_are_those_of_transformers(export, settings, sampling):
    assert ours(export)._prompt("written", "a", {"max_gen_toks": 8, **settings}, 0).sampling == sampling


def test_a_special_token_may_end_an_answer_and_no_other_stays_in_it(export):
    model, backend = ours(export), tokenizers.Tokenizer.from_file(str(export / "tokenizer.json"))
    backend.add_special_tokens(["<|end|>", "<|end|>ed", "</think>"])
    model.opened = model.opened._replace(tokenizer=Tokenizer(backend, EOT_TEXT))
    prompt = model.tok_encode("rows")
    tokens = model.tok_encode(f"so</think>the<|end|>ed model<|end|> reads{EOT_TEXT} a row")
    assert model._answer(prompt, tokens, {"until": ["<|end|> "]}) == "sothe model"
    assert model._answer(prompt, tokens, {"until": [EOT_TEXT]}) == "sothe model reads"
    assert model._answer(prompt, tokens, {}) == "sothe model reads a row"
    model._think_end = "</think>"
    assert model._answer(prompt, tokens, {"until": ["so", "<|end|> reads"]}) == "the model"


# --- chat ------------------------------------------------------------------------------------------------------

USER, ASSISTANT = {"role": "user", "content": "the model"}, {"role": "assistant", "content": "reads"}


@pytest.mark.parametrize(
    "messages",
    [[USER], [{"role": "system", "content": "a row"}, USER], [USER, ASSISTANT, USER], [USER, ASSISTANT],
     [USER, {"role": "assistant", "content": "the model "}]],
)  # fmt: skip
def test_messages_are_rendered_as_by_transformers(export, messages):
    mine, theirs = ours(export), peer(export)
    for add in (True, False):
        assert mine.apply_chat_template(messages, add) == theirs.apply_chat_template(messages, add)


def test_a_template_without_a_generation_prompt_opens_the_assistants_turn(export):
    model = ours(export)
    model.opened = model.opened._replace(template=DEFAULT_TEMPLATE)
    assert model.apply_chat_template([USER]).endswith("the model<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("template", "message", "sentence"),
    [
        (TEMPLATE, {"role": "user", "content": None}, "Message 1 of a task's chat is .*must have a role and a content"),
        (TEMPLATE, {"role": "user", "content": "\ud800"}, "Message 1 of a task's chat contains an unpaired surrogate"),
        ("{{ raise_exception('no users') }}", USER, "cannot render the conversation: .*no users"),
        ("{{ messages[0].content | upper }}", USER, "changes the message 'the model', so the model cannot continue"),
    ],
)
def test_messages_that_cannot_be_rendered_are_an_error(export, template, message, sentence):
    model = ours(export)
    model.opened = model.opened._replace(template=template)
    with pytest.raises(InputError, match=sentence):
        model.apply_chat_template([message], add_generation_prompt=False)
