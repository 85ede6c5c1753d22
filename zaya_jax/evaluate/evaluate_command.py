"""The work of `python -m zaya_jax.evaluate`: open, score, print, write; once, or each checkpoint as it appears."""

import argparse
import functools
import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from zaya_jax.checkpoint.environment import environment, versions
from zaya_jax.checkpoint.reader import verify_checkpoint
from zaya_jax.config import ParallelConfig
from zaya_jax.config.checks import counted
from zaya_jax.config.loader import to_dict
from zaya_jax.data.loading.account import evaluated_lines
from zaya_jax.errors import InputError, RunStopped, as_sentence, printable
from zaya_jax.evaluate import harness, results
from zaya_jax.evaluate.harness import SuiteConfig, load_suite, named_tasks
from zaya_jax.evaluate.heldout_run import RunHeldout
from zaya_jax.evaluate.results import FOLDER
from zaya_jax.evaluate.scoring import Scorer, text_losses
from zaya_jax.generate.source import open_text_model
from zaya_jax.job.multihost import broadcast, is_primary
from zaya_jax.model.fingerprint import fingerprint
from zaya_jax.model.tree import balancing_biases, parameters
from zaya_jax.run.checkpoints import CHECKPOINTS, checkpoint_folder, usable_checkpoints
from zaya_jax.run.files import display_path, expanded, read_text
from zaya_jax.run.folder import CONFIG, STATUS, is_locked
from zaya_jax.run.metrics import append_row, read_rows
from zaya_jax.run.status import RUNNING, read_status
from zaya_jax.run.versions import package_version
from zaya_jax.weights.load import is_transformers, open_weights

OpenHeldout = Callable[[Path], RunHeldout]
_POLL = 30.0  # seconds between two looks at a run that is followed
_PACKAGES = ("lm_eval", "datasets", "torch", "transformers")


class _Subject(NamedTuple):
    source: str
    run: Path | None  # None for a `transformers` folder
    step: int | None


def evaluate(options: argparse.Namespace) -> None:
    """Run the command; InputError before anything is compiled if an input cannot be used."""
    suite, texts = None, {path: read_text(path, "--text") for path in options.text}
    if options.config is not None:
        suite = load_suite(options.config)
    elif options.tasks is not None:
        suite = named_tasks(options.tasks)
    for path in (path for path, text in texts.items() if not text):
        raise InputError(f"--text {path} is empty, but must have text to score.")
    if suite is not None:
        harness.require_lm_eval()
    run = _follow if options.follow else _evaluate_once
    run(options, suite, texts, _name(options, suite, texts))


def _evaluate_once(options: argparse.Namespace, suite: SuiteConfig | None, texts: dict[str, str], name: str) -> None:
    peers = {peer: harness.require_peer(peer) for peer in options.peer}
    # Process 0 decides, since a training may save another checkpoint before the next process looks for the newest.
    subject = _subject(broadcast(_subject(options.path).source if is_primary() else ""))
    output = options.output
    if output is None and subject.run is not None:
        output = subject.run / results.FOLDER / f"{name}-{subject.step}.json"
    if output is not None and is_primary():
        results.check_writable(output)
    tasks: Any = _load_tasks(options, suite)  # not None if there are peers
    record = _score(options, subject, tasks, texts, RunHeldout)
    failed = _failed(record)  # a sentence about each request and peer without a score
    for peer, path in peers.items():
        try:
            model = harness.make_peer(path, tasks.suite, dtype=record["dtype"], rows=options.batch_rows)
            scores = harness.score_tasks(model, tasks, seed=options.seed, limit=options.limit)
            record.setdefault("peers", {})[peer] = scores
        except Exception as error:  # whatever it is, the scores so far have taken hours
            failed.append(f"--peer {peer} could not be scored. {type(error).__name__}: {as_sentence(error)}")
    _show(record)
    if output is not None and is_primary():
        results.write_record(output, record)
        print(f"Wrote {display_path(output)}")
    _require_all(failed)


def _failed(record: dict[str, Any]) -> list[str]:
    return [message for result in record.get("tasks", {}).values() for message in result.get("failed", ())]


def _require_all(failed: Sequence[str]) -> None:
    if failed:
        more = f" And {len(failed) - 10:,} more." if len(failed) > 10 else ""
        raise RunStopped(f"{' '.join(failed[:10])}{more} These tasks and peers have no scores.")


def _follow(options: argparse.Namespace, suite: SuiteConfig | None, texts: dict[str, str], name: str) -> None:
    if (count := jax.process_count()) > 1:
        advice = "Start one process, or remove --follow."
        raise InputError(f"--follow runs in one process, but this job has {count}. {advice}")
    run = expanded(options.path).resolve()
    check_followed(run)
    output = options.output or run / results.FOLDER / f"{name}.jsonl"
    results.check_writable(output)
    tasks, heldout = _load_tasks(options, suite), functools.cache(RunHeldout)
    failed: list[str] = []

    def score(step: int) -> dict[str, Any]:
        subject = _Subject(str(run / CHECKPOINTS / str(step)), run, step)
        record = _score(options, subject, tasks, texts, heldout)
        _show(record)
        failed.extend(_failed(record))
        return record

    follow(run, output, name, score)
    _require_all(list(dict.fromkeys(failed)))


def _load_tasks(options: argparse.Namespace, suite: SuiteConfig | None) -> harness.LoadedTasks | None:
    if suite is None:
        return None
    if is_primary():
        print("Reading lm-eval's tasks and their data.", flush=True)
    runs_code, folder = options.run_generated_code, options.task_folder
    return harness.load_tasks(suite, folder=folder, runs_code=runs_code, seed=options.seed)


def _name(options: argparse.Namespace, suite: SuiteConfig | None, texts: dict[str, str]) -> str:
    """Return the NAME of this evaluation in files, see `results.evaluation_name`."""
    scored = ["text"] if texts else []
    if suite is not None:
        scored += [task.name for task in suite.tasks] if options.config is None else [Path(options.config).stem]
    folders = {"task_folder": options.task_folder, "tokenizer": options.tokenizer}
    settings = {key: None if value is None else str(expanded(value).resolve()) for key, value in folders.items()}
    settings |= {"seed": options.seed, "limit": options.limit, "dtype": options.dtype, "peers": options.peer}
    digests = {path: hashlib.sha256(text.encode()).hexdigest() for path, text in texts.items()}
    identity = {"suite": None if suite is None else to_dict(suite), "texts": digests, **settings}
    return results.evaluation_name(scored, identity)


def _subject(source: str) -> _Subject:
    """Resolve PATH to one model; InputError if it is neither a checkpoint nor a `transformers` folder."""
    if is_transformers(source):
        return _Subject(source, None, None)
    checkpoint = checkpoint_folder(source, "PATH")
    return _Subject(str(checkpoint), checkpoint.parent.parent, int(checkpoint.name))


def _score(
    options: argparse.Namespace, subject: _Subject, tasks: Any, texts: dict[str, str], heldout: OpenHeldout
) -> dict[str, Any]:
    started, now = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    record: dict[str, Any] = {"model": subject.source, "step": subject.step, "time": now}
    if tasks is None and not texts:
        record |= _score_heldout(subject, heldout)
    else:
        record |= _score_texts_and_tasks(options, subject, tasks, texts)
    packages = {name: version for name in _PACKAGES if (version := package_version(name)) is not None}
    record["versions"] = versions() | packages
    return record | {"environment": environment(), "seconds": round(time.monotonic() - started, 3)}


def _score_heldout(subject: _Subject, heldout: OpenHeldout) -> dict[str, Any]:
    if subject.run is None:
        advice = "Name what to score: --text FILE, --tasks A,B or --config FILE."
        raise InputError(f"{subject.source} is a transformers folder, which has no held-out data. {advice}")
    weights = open_weights(subject.source, "PATH")
    if is_primary():
        print("Scoring the held-out text of the run", flush=True)
    run, step = heldout(subject.run), subject.step or 0
    losses, texts = run.losses(weights, step), run.texts(step)
    scores = {name: results.text_record(loss, texts[name].text_bytes) for name, loss in losses.items()}
    return {"heldout": scores, "data": {name: text.use._asdict() for name, text in texts.items()}}


def _score_texts_and_tasks(
    options: argparse.Namespace, subject: _Subject, tasks: harness.LoadedTasks | None, texts: dict[str, str]
) -> dict[str, Any]:
    progress = functools.partial(results.report_progress, show=is_primary())
    opened = open_text_model(subject.source, options.dtype, options.tokenizer, ParallelConfig())
    model: Any = None
    if tasks is not None:  # first, since it refuses tasks that cannot be answered
        from zaya_jax.evaluate.lm_eval_model import ZayaLM

        settings = {"seed": options.seed, "tokens": options.batch_tokens, "rows": options.batch_rows}
        model = ZayaLM(opened, think_end=tasks.suite.think_end, **settings)
        model.check(tasks.tasks, chat=tasks.suite.chat_template)
        model.progress = progress
    arrays = {**parameters(opened.model), **balancing_biases(opened.model)}
    record: dict[str, Any] = {"dtype": opened.model.dtype.name, "fingerprint": fingerprint(arrays)}
    if texts:
        scorer = model.scorer if model else Scorer(opened.model, opened.placement, tokens=options.batch_tokens)
        losses = text_losses(scorer, opened.tokenizer, texts, progress("texts"))
        record["texts"] = {name: results.text_record(*loss) for name, loss in losses.items()}
    if tasks is not None:
        record["tasks"] = harness.score_tasks(model, tasks, seed=options.seed, limit=options.limit)
        record["truncated"] = model.truncated
        record["suite"], record["not_covered"] = to_dict(tasks.suite), list(tasks.suite.not_covered)
    names = ("seed", "limit", "batch_tokens", "batch_rows")
    return record | {"settings": {name: getattr(options, name) for name in names}}


def _show(record: dict[str, Any]) -> None:
    if not is_primary():
        return
    step = "" if record["step"] is None else f", step {record['step']}"
    print(f"{display_path(Path(record['model']))}{step}")
    for kind in ("heldout", "texts"):
        if kind in record:
            print(results.text_table(record[kind]))
    for name, use in record.get("data", {}).items():
        for line in evaluated_lines(use):
            print(f"{name}: {line}")
    if "tasks" in record:
        print(results.task_table({"this model": record["tasks"], **record.get("peers", {})}))
    for name in record.get("not_covered", ()):
        print(f"not covered by lm-eval: {name}")


def follow(run: Path, path: Path, name: str, score: Callable[[int], dict[str, Any]]) -> None:
    """Score the checkpoints of a run until its training ends; it runs, has ended, or has not started yet.

    Each adds a line to the JSONL file `path`, which may have other evaluations, too; steps that it has under `name` are
    not scored again. `score` scores a step, and compares its checksums. If it raises, the checkpoint is left out if it
    is gone or damaged; InputError if it is intact.
    """
    if not (run / CONFIG).exists():
        print(printable(f"Waiting for a training to start in {run}."))
    done = {row.get("step") for row in read_rows(path) if row.get("name") == name}
    missing: set[int] = set()
    while True:
        ended = has_ended(run)  # first, so that a checkpoint saved between the two checks is not missed
        steps = [step for step in finished_steps(run) if step not in done | missing]
        for step in steps[:1]:  # then check again, because scoring may take longer than the retention of the next one
            try:
                row = score(step)
            except (InputError, OSError):
                gone = step not in finished_steps(run)
                if not gone and not verify_checkpoint(run / CHECKPOINTS / str(step)):
                    raise
                print(f"Step {step} is not scored: its checkpoint {'was removed first' if gone else 'is damaged'}.")
                missing.add(step)
                continue
            append_row(path, {"name": name, **row, "step": step})
            done.add(step)
        if not steps:
            if ended:
                print(
                    printable(f"The training has ended; {path} has the scores of {counted(len(done), 'checkpoint')}.")
                )
                return
            time.sleep(_POLL)


def check_followed(run: Path) -> None:
    """Raise `InputError` unless a folder has a run, or nothing that keeps a training from starting in it."""
    if not run.is_dir():
        raise InputError(f"--follow {run} is not a folder, but must be the folder of a run.")
    if (run / CONFIG).exists() or is_locked(run) is not False:
        return
    if any(not entry.name.startswith(".") and entry.name not in (STATUS, FOLDER) for entry in run.iterdir()):
        advice = "Name the folder of a run, or an empty one in which a training will start."
        raise InputError(f"--follow {run} has files but no run. {advice}")


def has_ended(run: Path) -> bool:
    """Return whether a training has started and ended; its lock shows one that has not written its status yet."""
    status, held = read_status(run), is_locked(run)
    ended = held is False if status is None else not held and status.state != RUNNING
    return (run / CONFIG).exists() and ended


def finished_steps(run: Path) -> list[int]:
    """List the steps of checkpoints that are saved completely."""
    return [checkpoint.step for checkpoint in usable_checkpoints(run / CHECKPOINTS)]
