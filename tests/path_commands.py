"""Commands in this process whose every path has a name that was drawn, in a folder for each kind of path."""

import contextlib
import io
import itertools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.aegis.metrics_helpers import write_node
from tests.train_helpers import write_run
from zaya_jax.aegis.__main__ import main as aegis
from zaya_jax.checkpoint.__main__ import main as checkpoint
from zaya_jax.data.__main__ import main as data
from zaya_jax.data.chat.template import DEFAULT_TEMPLATE
from zaya_jax.evaluate.__main__ import main as evaluate
from zaya_jax.generate.__main__ import main as generate
from zaya_jax.machine.__main__ import main as machine
from zaya_jax.main import main as train
from zaya_jax.report.__main__ import main as report

FORMS = {"whole": "{base}/{path}", "relative": "{path}", "slash": "./{path}/", "up": "up/../{path}"}


class Commands:
    """Runs commands in `base`, the working directory, and asserts their status and what they write.

    Args:
      base: an empty folder.
      names: of the files and folders in the arguments, one for each kind, in turn; a file also gets a suffix.
      form: how paths are written, a key of `FORMS`.
    """

    def __init__(self, base: Path, names: Sequence[str], form: str) -> None:
        self.base, self.form = base, form
        self._names = itertools.cycle(names)
        self._kinds: dict[str, str] = {}  # kind of path → its name
        (base / "up").mkdir()

    def at(self, kind: str, suffix: str = "") -> str:
        """The path of the folder or, with a suffix, of the file of a kind."""
        if kind not in self._kinds:
            (self.base / kind).mkdir()
            self._kinds[kind] = os.fsdecode(os.fsencode(next(self._names))[: 255 - len(suffix)]) + suffix
        path = f"{kind}/{self._kinds[kind]}"
        form = "relative" if suffix and self.form == "slash" else self.form
        return FORMS[form].format(base=self.base, path=path)

    def __call__(self, main: Callable[[list[str]], int], *arguments: str, status: int = 0) -> str:
        """Run a command; what it prints."""
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            ended = main(list(arguments))
        text = out.getvalue()
        assert ended == status, (main.__module__, arguments, text[-2000:])
        strange = {character for character in text if not character.isprintable()} - {"\n"}
        assert main is generate or not strange, (main.__module__, arguments, text)
        return text

    def check_folders(self) -> None:
        """Nothing was written beside what commands were told of."""
        assert {path.name for path in self.base.iterdir()} == {"up", *self._kinds}
        assert not os.listdir(self.base / "up")
        assert {kind: os.listdir(self.base / kind) for kind in self._kinds} == {
            kind: [name] for kind, name in self._kinds.items()
        }


def write_inputs(commands: Commands) -> list[str]:
    """A corpus and a configuration; the arguments of a training on them."""
    base, at = commands.base, commands.at
    write_run(base / "up")
    corpus = Path(at("corpus"))
    corpus.mkdir()
    for number, file in enumerate(sorted((base / "up" / "corpus").iterdir())):
        # Hidden files are left out.
        file.rename(corpus / f"a{os.fsdecode(os.fsencode(corpus.name)[:240])}{number}.txt")
    (base / "up" / "run.yaml").rename(at("config", ".yaml"))
    (base / "up" / "corpus").rmdir()
    return ["--config", at("config", ".yaml"), f"run_dir={at('run')}", f"data.corpus={at('corpus')}",
            f"data.cache_dir={at('cache')}", "sample.tokens=0"]  # fmt: skip


def train_and_resume(commands: Commands, keys: list[str]) -> None:
    """Train, resume, and look at the run and its checkpoints of the steps 5 and 10."""
    run, at = commands.at("run"), commands.at
    keys = [*keys, f"checkpoint.local_dir={at('local')}", "checkpoint.keep=5"]
    commands(train, *keys, "phases.0.tokens=640")
    commands(train, *keys, "phases.0.tokens=1280")
    assert commands(checkpoint, "verify", "--all", run).count("OK, all checksums match") == 2
    commands(checkpoint, "verify", f"{run}@train")
    commands(checkpoint, "ls", run)
    commands(checkpoint, "inspect", f"{run}/checkpoints/10")
    commands(checkpoint, "diff", f"{run}/checkpoints/5", run, status=1)
    commands(checkpoint, "export-hf", run, at("export"), "--dtype", "float32")
    commands(report, run, "--output", at("page", ".html"), "--config", at("config", ".yaml"))


def use_weights(commands: Commands, keys: list[str]) -> None:
    """Average, import and export, generate, evaluate, and start other runs from the weights."""
    run, export, at = commands.at("run"), commands.at("export"), commands.at
    commands(checkpoint, "average", run, f"{run}/checkpoints/5", "--output", at("average"))
    commands(checkpoint, "import-hf", export, "--output", at("import"))
    commands(checkpoint, "export-hf", f"hf:{export}", at("again"), "--dtype", "float32", "--carry", export)
    Path(at("prompt", ".txt")).write_text("the model")
    prompt, few = ["--file", at("prompt", ".txt")], ["--max-new-tokens", "2", "--temperature", "0"]
    sources = (run, f"{run}@train", export, f"hf:{export}", at("import"))
    assert len({commands(generate, source, *prompt, *few) for source in sources}) == 1
    commands(generate, run, "--tokenizer", export, *prompt, *few)
    commands(evaluate, run)
    commands(evaluate, run, "--text", at("prompt", ".txt"), "--output", at("scores", ".json"))
    commands(evaluate, "--follow", run)
    commands(train, *keys, f"run_dir={at('from')}", f"init_from={run}@train", "phases.0.tokens=640")
    commands(train, *keys, f"run_dir={at('on')}", f"resume_from={run}/checkpoints/5", "phases.0.tokens=1280")
    commands(report, at("from"), at("on"), "--output", at("page", ".html"))


def use_data(commands: Commands, keys: list[str]) -> None:
    """Prepare texts and conversations, and train adapters on both."""
    at, config = commands.at, keys[:2]
    talk = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"return {n}"}] for n in range(40)]
    Path(at("talk", ".jsonl")).write_text("".join(json.dumps({"messages": each}) + "\n" for each in talk))
    Path(at("template", ".jinja")).write_text(DEFAULT_TEMPLATE)
    prepare = ["prepare", "--tokenizer", at("export"), "--workers", "1", "--heldout", "0.3"]
    commands(data, *prepare, "--input", at("corpus"), "--output", at("texts"))
    commands(data, *prepare, "--input", at("corpus"), "--output", at("tasks"), "--of", "2")
    commands(data, *prepare, "--input", at("corpus"), "--output", at("tasks"), "--of", "2", "--task", "1")
    commands(data, "merge", at("tasks"))
    commands(data, *prepare, "--chat", "--input", at("talk", ".jsonl"), "--output", at("chats"))
    tuned = [*keys[2:], f"run_dir={at('tuned')}", "data.sources={texts: {path: a}, chats: {path: b}}",
             "data.corpus=stdlib", "data.suffixes=[.py]", "data.heldout_fraction=0.04",
             f"data.sources.texts.path={at('texts')}", f"data.sources.chats.path={at('chats')}",
             "phases.0.mixture={texts: 1, chats: 1}", f"phases.0.template={at('template', '.jinja')}",
             f"init_from=hf:{at('export')}", "lora={rank: 2, alpha: 3}", "phases.0.tokens=640"]  # fmt: skip
    commands(train, *config, *tuned)
    commands(data, "describe", config[1], *tuned)
    commands(generate, at("tuned"), "--prompt", "a", "--max-new-tokens", "2", "--temperature", "0")
    commands(checkpoint, "export-hf", at("tuned"), at("merged"), "--base", f"hf:{at('export')}")


def end(commands: Commands, keys: list[str]) -> None:
    """Supervisors' reports, a result of a machine, and what removes checkpoints."""
    run, at = commands.at("run"), commands.at
    write_node(Path(run), state="ended", exit_code=0, why="finished", ranks=[])
    for arguments in (["status"], ["report"], ["report", "--json"]):
        commands(aegis, *arguments, run)
    Path(at("results")).mkdir()
    small = ["--size", "1M", "--threads", "1", "--repeats", "1"]
    commands(machine, "storage", *keys[1:], *small, "--output", f"{at('results')}/storage.json")
    commands(checkpoint, "rollback", run, "5")
    commands(checkpoint, "prune", run, "--keep", "1")
    assert [path.name for path in Path(run, "checkpoints").iterdir() if path.name.isdecimal()] == ["5"]
