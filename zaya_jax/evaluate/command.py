"""What `python -m zaya_jax.evaluate` does: open, score, print, write."""

import argparse
import functools
import importlib.metadata
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from zaya_jax.checkpoint.environment import environment, versions
from zaya_jax.config.loader import to_dict
from zaya_jax.config.weight_source import HF
from zaya_jax.errors import InputError
from zaya_jax.evaluate import harness
from zaya_jax.evaluate.follow import follow
from zaya_jax.evaluate.heldout_run import RunHeldout
from zaya_jax.evaluate.results import (
    FOLDER,
    check_writable,
    default_path,
    report_progress,
    task_table,
    text_record,
    text_table,
    write_record,
)
from zaya_jax.evaluate.scoring import Scorer
from zaya_jax.evaluate.suites import SuiteConfig, load_suite, named_tasks
from zaya_jax.evaluate.texts import read_texts, text_losses
from zaya_jax.generate.source import open_text_model
from zaya_jax.model.fingerprint import fingerprint
from zaya_jax.model.tree import balancing_biases, parameters
from zaya_jax.parallel.multihost import is_primary
from zaya_jax.run.checkpoints import CHECKPOINTS, checkpoint_folder
from zaya_jax.weights.load import open_weights

_PACKAGES = ("lm_eval", "datasets", "torch", "transformers")


class _Subject(NamedTuple):
    """What is scored."""

    source: str
    run: Path | None  # None for a `transformers` folder
    step: int | None


def evaluate(options: argparse.Namespace) -> None:
    """Run the command; InputError before anything is compiled if an input cannot be used."""
    suite = _suite(options)
    texts = read_texts(options.text)
    if options.output is not None:
        check_writable(options.output)
    if suite is not None:
        harness.require_lm_eval()
        peers = {peer: harness.require_peer(peer) for peer in options.peer}
    else:
        peers = {}
    subject = None if options.follow else _subject(options.path)
    if subject is not None and subject.run is None and suite is None and not texts:
        raise InputError(f"{options.path} is a transformers folder, which has no held-out data. Name what to score: "
                         "--text FILE, --tasks A,B or --config FILE.")  # fmt: skip
    tasks = None
    if suite is not None:
        if is_primary():
            print("Reading lm-eval's tasks and their data.", flush=True)
        tasks = harness.load_tasks(suite, folder=options.task_folder, runs_code=options.run_generated_code,
                                   seed=options.seed)  # fmt: skip
    score = functools.partial(_score, options, tasks=tasks, texts=texts, heldout=functools.cache(RunHeldout))
    if subject is None:
        _follow(options, score)
        return
    record = score(subject)
    if tasks is not None and peers:
        record["peers"] = {peer: _score_peer(options, tasks, name, record["dtype"]) for peer, name in peers.items()}
    _show(record)
    path = options.output or default_path(subject.run, _name(options), subject.step)
    if path is not None and is_primary():
        write_record(path, record)
        print(f"Wrote {path}")


def _suite(options: argparse.Namespace) -> SuiteConfig | None:
    if options.config is not None:
        return load_suite(options.config)
    return None if options.tasks is None else named_tasks(options.tasks)


def _name(options: argparse.Namespace) -> str:
    if options.config is not None:
        return Path(options.config).stem
    return "tasks" if options.tasks is not None else "text" if options.text else "heldout"


def _subject(source: str) -> _Subject:
    """Find out what PATH is; InputError if nothing that can be scored."""
    folder = Path(source).expanduser()
    if source.startswith(HF) or (folder / "config.json").is_file():
        return _Subject(source, None, None)
    checkpoint = checkpoint_folder(source, "PATH")
    return _Subject(str(checkpoint), checkpoint.parent.parent, int(checkpoint.name))


def _score(
    options: argparse.Namespace, subject: _Subject, *, tasks: harness.LoadedTasks | None, texts: dict[str, str],
    heldout: Callable[[Path], RunHeldout],
) -> dict[str, Any]:  # fmt: skip
    """Score one model; returns the record."""
    started = time.monotonic()
    record: dict[str, Any] = {"model": subject.source, "step": subject.step,
                              "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}  # fmt: skip
    progress = functools.partial(report_progress, show=is_primary())
    if tasks is None and not texts:
        if subject.run is None:
            raise InputError(f"{subject.source} has no held-out data.")
        weights = open_weights(subject.source, "PATH")
        losses = heldout(subject.run).losses(weights)
        record["heldout"] = {name: text_record(loss) for name, loss in losses.items()}
    else:
        opened = open_text_model(subject.source, options.dtype, options.tokenizer)
        record["dtype"] = opened.model.dtype.name
        record["fingerprint"] = fingerprint({**parameters(opened.model), **balancing_biases(opened.model)})
        if texts:
            scorer = Scorer(opened.model, tokens=options.batch_tokens)
            losses = text_losses(scorer, opened.tokenizer, texts, progress("texts"))
            record["texts"] = {name: text_record(loss) for name, loss in losses.items()}
        if tasks is not None:
            model = harness.make_model(opened, tasks.suite, seed=options.seed, tokens=options.batch_tokens,
                                       rows=options.batch_rows, progress=progress)  # fmt: skip
            record["tasks"] = harness.score_tasks(model, tasks, seed=options.seed, limit=options.limit)
            record["suite"], record["not_covered"] = to_dict(tasks.suite), list(tasks.suite.not_covered)
    record["settings"] = {"seed": options.seed, "limit": options.limit, "batch_tokens": options.batch_tokens,
                          "batch_rows": options.batch_rows}  # fmt: skip
    record["versions"] = versions() | {name: version for name in _PACKAGES if (version := _version(name)) is not None}
    record["environment"], record["seconds"] = environment(), round(time.monotonic() - started, 3)
    return record


def _score_peer(options: argparse.Namespace, tasks: harness.LoadedTasks, name: str, dtype: str) -> dict[str, Any]:
    model = harness.make_peer(name, tasks.suite, dtype=dtype, rows=options.batch_rows)
    return harness.score_tasks(model, tasks, seed=options.seed, limit=options.limit)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _show(record: dict[str, Any]) -> None:
    if not is_primary():
        return
    step = "" if record["step"] is None else f", step {record['step']}"
    print(f"{record['model']}{step}")
    for kind in ("heldout", "texts"):
        if kind in record:
            print(text_table(record[kind]))
    if "tasks" in record:
        print(task_table({"this model": record["tasks"], **record.get("peers", {})}))
    for name in record.get("not_covered", ()):
        print(f"not covered by lm-eval: {name}")


def _follow(options: argparse.Namespace, score: Callable[[_Subject], dict[str, Any]]) -> None:
    run = Path(options.path).expanduser().resolve()
    path = options.output or run / FOLDER / f"{_name(options)}.jsonl"

    def score_step(step: int) -> dict[str, Any]:
        record = score(_Subject(str(run / CHECKPOINTS / str(step)), run, step))
        _show(record)
        return record

    follow(run, path, score_step, options.poll)
