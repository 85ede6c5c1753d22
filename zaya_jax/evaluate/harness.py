"""Run lm-eval: find and load the tasks of a suite, such as `configs/evals/base.yaml`, score models, and summarise.

lm-eval is imported only here and in `lm_eval_model`, and only when tasks are scored.
"""

# lm-eval's own types are checked only where it is installed, and reject what it accepts.
# pyright: reportTypedDictNotRequiredAccess=false, reportCallIssue=false, reportArgumentType=false

import functools
import hashlib
import importlib.util
import os
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zaya_jax.config.checks import require
from zaya_jax.config.loader import load_as
from zaya_jax.errors import InputError, as_sentence, did_you_mean
from zaya_jax.generate.sampling import Sampling

HF_PEER = "hf:"
_ALLOW = "HF_ALLOW_CODE_EVAL"  # what the metric of HumanEval asks for
_PEER_PACKAGES = ("torch", "transformers", "accelerate")


@dataclass(frozen=True)
class TaskConfig:
    """One task, group or tag of lm-eval. Values that are None are the task's own."""

    name: str
    fewshot: int | None = None  # examples in the prompt
    samples: int = 1  # continuations of each prompt, over which scores are averaged (avg@k)
    temperature: float | None = None  # the sampling of continuations
    top_p: float | None = None
    top_k: int | None = None
    max_new_tokens: int | None = None

    def check(self, key: str) -> None:
        """Raise `InputError` for values out of range."""
        require(bool(self.name.strip()), f"{key}.name", self.name, "the name of a task")
        require(self.fewshot is None or self.fewshot >= 0, f"{key}.fewshot", self.fewshot, "at least 0")
        require(self.samples >= 1, f"{key}.samples", self.samples, "at least 1")
        new = self.max_new_tokens
        require(new is None or new >= 1, f"{key}.max_new_tokens", new, "at least 1")
        sampling = Sampling(self.temperature or 0.0, self.top_k or 0, 1.0 if self.top_p is None else self.top_p)
        sampling.check(f"{key}.")
        above = f"above 0, because {key}.samples is {self.samples}"
        require(self.samples == 1 or self.temperature != 0, f"{key}.temperature", self.temperature, above)

    @property
    def generation(self) -> dict[str, float | int | bool]:
        """Values that replace those of the task's `generation_kwargs`."""
        values = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        values |= {"max_gen_toks": self.max_new_tokens}
        values |= {"do_sample": None if self.temperature is None else self.temperature > 0}
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class SuiteConfig:
    """A suite of tasks."""

    tasks: tuple[TaskConfig, ...]
    chat_template: bool = False  # whether prompts are messages, rendered with the model's chat template
    think_end: str | None = None  # text after which answers of a reasoning model begin
    not_covered: tuple[str, ...] = ()  # benchmarks of the same table that lm-eval does not have

    def check(self) -> None:
        """Raise `InputError` for invalid values."""
        require(bool(self.tasks), "tasks", [], "a list of at least one task")
        for task in self.tasks:
            task.check(f"tasks.{task.name}")
        twice = [name for name, count in Counter(task.name for task in self.tasks).items() if count > 1]
        require(not twice, "tasks", twice[0] if twice else "", "a list that names each task once")
        require(self.think_end != "", "think_end", self.think_end, "null or a text of at least one character")


def load_suite(path: str | Path) -> SuiteConfig:
    """Read a suite; InputError if a key is unknown or a value is invalid, see `config.load_config`."""
    suite = load_as(SuiteConfig, path)
    suite.check()
    return suite


def named_tasks(names: str) -> SuiteConfig:
    """Make a suite of tasks with their own settings from `--tasks a,b,c`; InputError if a name is empty or repeated."""
    tasks = [name.strip() for name in names.split(",")]
    allowed = "names of tasks with commas between them, each name once"
    require(all(tasks) and len({*tasks}) == len(tasks), "--tasks", names, allowed)
    return SuiteConfig(tuple(map(TaskConfig, tasks)))


class LoadedTasks(NamedTuple):
    """The tasks of a suite."""

    suite: SuiteConfig
    tasks: dict[str, Any]  # lm-eval's tasks by name; those of groups and tags, too
    groups: dict[str, Any]  # lm-eval's groups by name
    entries: dict[str, TaskConfig]  # name of a task → the entry of the suite that named it
    runs_code: bool  # whether code that models write is executed


def require_lm_eval() -> None:
    """Raise `InputError` if lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        advice = "Install it with: pip install 'zaya-jax[evaluation]'."
        raise InputError(f"lm-eval is not installed, and --tasks and --config need it. {advice}")


def require_peer(peer: str) -> str:
    """Return what `transformers` loads for --peer; InputError if it cannot be."""
    if missing := [name for name in _PEER_PACKAGES if importlib.util.find_spec(name) is None]:
        advice = "Install what is missing with: pip install 'zaya-jax[evaluation,parity]'."
        raise InputError(f"--peer {peer} needs {', '.join(missing)}. {advice}")
    name = peer.removeprefix(HF_PEER)
    require(name not in ("", peer), "--peer", peer, "hf:NAME or hf:FOLDER, such as hf:Qwen/Qwen3-4B")
    return name


def load_tasks(
    suite: SuiteConfig, *, folder: Path | None = None, own_only: bool = False, runs_code: bool = False, seed: int = 0
) -> LoadedTasks:
    """Load the tasks of a suite with their data; InputError if one is unknown or executes code, or its data is missing.

    A `folder` has more tasks, as YAML files; lm-eval's own, which take seconds to list, are left out with `own_only`.
    With `runs_code`, tasks may execute code that a model wrote. Examples in prompts are chosen with `seed`.
    """
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    require(folder is None or folder.is_dir(), "--task-folder", str(folder), "a folder of YAML files")
    manager = TaskManager(include_path=None if folder is None else str(folder), include_defaults=not own_only)
    index = manager.task_index
    for entry in suite.tasks:
        _check_task(entry.name, index, runs_code)
    if runs_code:
        os.environ[_ALLOW] = "1"
    loaded = LoadedTasks(suite, {}, {}, {}, runs_code)
    for entry in suite.tasks:
        try:
            members = manager.load([entry.name])
        except Exception as error:  # of the network, of a data set, of a package that a task needs
            problem, reason = f"The task {entry.name} cannot be loaded", f"{type(error).__name__}: {as_sentence(error)}"
            raise InputError(f"{problem}; its data or a package is missing here. {reason}") from error
        for name, task in members["tasks"].items():
            if name in loaded.tasks:
                raise InputError(f"The task {name} is in {entry.name} and in {loaded.entries[name].name}; remove one.")
            _apply(entry, task, seed)
            task.build_all_requests = functools.partial(_build_requests, name, task.build_all_requests)
            loaded.tasks[name], loaded.entries[name] = task, entry
        loaded.groups.update(members["groups"])
    return loaded


def _build_requests(name: str, build: Callable[..., None], *arguments: Any, **settings: Any) -> None:
    """Make the requests of a task with lm-eval's `build`; an error in them, or of the chat template, names it."""
    try:
        build(*arguments, **settings)
    except Exception as error:  # of any code that a task may have
        kind = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        raise InputError(f"The requests of the task {name} cannot be made. {kind}{as_sentence(error)}") from error


def _check_task(name: str, index: Mapping[str, Any], runs_code: bool) -> None:
    """Raise `InputError` if a task is unknown, or would execute code without permission."""
    if name not in index:
        advice = f"{did_you_mean(name, index)} List its tasks with: lm_eval ls tasks."
        raise InputError(f"The task {name!r} is unknown to the installed lm-eval.{advice}")
    unsafe = next((member for member, config in _members(name, index, set()) if config.get("unsafe_code")), None)
    if unsafe is not None and not runs_code:
        advice = "Run it in a sandbox, and allow it with --run-generated-code."
        raise InputError(f"The task {unsafe} executes code that the model writes, on this machine. {advice}")


def _members(name: str, index: Mapping[str, Any], seen: set[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the configuration of a task, and of all tasks of a group or a tag."""
    if name in seen or name not in index:
        return
    seen.add(name)
    config = index[name].cfg or {}
    yield name, config
    parts: Any = config.get("task")
    for part in parts if isinstance(parts, list) else ():
        member = str(part.get("task") if isinstance(part, dict) else part)
        if isinstance(part, dict):
            yield member, part
        yield from _members(member, index, seen)
    for member in index[name].tags if index[name].kind.name == "TAG" else ():
        yield from _members(member, index, seen)


def _apply(entry: TaskConfig, task: Any, seed: int) -> None:
    generates = task.get_config("output_type") == "generate_until"
    if not generates and (entry.generation or entry.samples > 1):
        problem, keys = f"The task {task.task_name}", "samples, temperature, top_p, top_k or max_new_tokens"
        raise InputError(f"{problem} writes no continuations, so tasks.{entry.name} must not set {keys}.")
    if generates and entry.generation:
        task.set_config(key="generation_kwargs", value=entry.generation, update=True)
    if generates and entry.samples > 1 and not (task.get_config("generation_kwargs") or {}).get("do_sample"):
        reason = "but its continuations are always the same; set temperature"
        raise InputError(f"tasks.{entry.name}.samples is {entry.samples}, {reason}.")
    if entry.fewshot is not None or task.get_config("num_fewshot") is None:
        task.set_config(key="num_fewshot", value=entry.fewshot or 0)
    task.set_fewshot_seed(seed=seed)


def score_tasks(model: Any, loaded: LoadedTasks, *, seed: int, limit: int | None = None) -> dict[str, Any]:
    """Score an lm-eval model on tasks, or on so many items of each (`limit`); `seed` is that of everything random.

    With `samples: k`, a task is scored k times, and its scores are means over them (avg@k). Returns for each task, and
    each group that lm-eval averages: `version`, `fewshot`, `samples`, `items`, `prompts` (sha256 of all prompts and
    targets), `metrics`: name → `value`, `stderr`, `higher_is_better`. A task with requests that cannot be answered has
    no metrics, but a sentence about each in `failed`; groups with such a task are left out.
    """
    from lm_eval.evaluator import evaluate  # pyright: ignore[reportMissingImports]

    rounds: list[dict[str, Any]] = []
    failed: dict[str, list[str]] = {}
    for sample in range(max(entry.samples for entry in loaded.entries.values())):
        names = [name for name, entry in loaded.entries.items() if entry.samples > sample]
        chosen = {"tasks": {name: loaded.tasks[name] for name in names}}
        chosen["groups"] = {name: group for name, group in loaded.groups.items() if _task_names(group) <= {*names}}
        random.seed(seed + sample)
        np.random.seed(seed + sample)
        if "torch" in sys.modules:  # a peer samples with it
            from lm_eval.utils import set_torch_seed  # pyright: ignore[reportMissingImports]

            set_torch_seed(seed + sample)
        for name in names:
            loaded.tasks[name].set_fewshot_seed(seed=seed)  # so that all rounds have the same prompts
        model.failed = failed
        model.samples = {name: entry.samples for name, entry in loaded.entries.items()}
        model.sample = sample
        prompts = {"apply_chat_template": loaded.suite.chat_template, "fewshot_as_multiturn": True}
        code = {"confirm_run_unsafe_code": loaded.runs_code}
        rounds.append(evaluate(model, chosen, limit=limit, log_samples=True, **prompts, **code))
    return _summary(rounds, loaded, failed)


def _task_names(group: Any) -> set[str]:
    return {task.task_name for task in group.get_all_tasks()}


def _summary(rounds: Sequence[Mapping[str, Any]], loaded: LoadedTasks, failed: Mapping[str, Any]) -> dict[str, Any]:
    first, summary = rounds[0], {}
    for name in {**first["results"], **first.get("groups", {})}:
        own = [each for each in rounds if name in each["results"] or name in each.get("groups", {})]
        results = [{**each["results"].get(name, {}), **each.get("groups", {}).get(name, {})} for each in own]
        samples = [each["samples"].get(name, ()) for each in own]
        metrics = _metrics(results, samples, first["higher_is_better"].get(name, {}))
        members = _task_names(loaded.groups[name]) if name in loaded.groups else ()
        if not metrics or not failed.keys().isdisjoint(members):
            continue
        summary[name] = {
            "version": first["versions"].get(name),
            "fewshot": first.get("n-shot", {}).get(name),
            "samples": len(own),
            "items": first.get("n-samples", {}).get(name, {}).get("effective"),
            "metrics": metrics,
        }
        if name in loaded.tasks:
            summary[name]["prompts"] = _digest(samples[0])
        if name in failed:
            summary[name] |= {"metrics": {}, "failed": list(dict.fromkeys(failed[name]))}
    return summary


def _metrics(
    results: Sequence[Mapping[str, Any]], samples: Sequence[Any], better: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Return the mean of each metric over the rounds of a task, with its standard error."""
    metrics = {}
    for metric, value in results[0].items():
        if "," not in metric or "_stderr," in metric or not isinstance(value, int | float):
            continue
        plain, _, chosen = metric.partition(",")
        stderr = results[0].get(f"{plain}_stderr,{chosen}")
        if len(results) > 1:
            stderr = _standard_error(samples, plain, chosen)
        mean = sum(result[metric] for result in results) / len(results)
        stderr = stderr if isinstance(stderr, float) else None
        metrics[metric] = {"value": mean, "stderr": stderr, "higher_is_better": better.get(plain)}
    return metrics


def _standard_error(rounds: Sequence[Sequence[Mapping[str, Any]]], metric: str, chosen: str) -> float | None:
    """Return the standard error of the mean over items, each the mean of its samples."""
    values: dict[Any, list[float]] = defaultdict(list)
    for samples in rounds:
        for sample in samples:
            if sample["filter"] == chosen and isinstance(sample.get(metric), int | float):
                values[sample["doc_id"]].append(float(sample[metric]))
    means = [sum(scores) / len(scores) for scores in values.values()]
    return float(np.std(means, ddof=1) / np.sqrt(len(means))) if len(means) > 1 else None


def _digest(samples: Iterable[Mapping[str, Any]]) -> str:
    keys = ("doc_id", "doc_hash", "prompt_hash", "target_hash")
    lines = {" ".join(str(sample[key]) for key in keys) + "\n" for sample in samples}
    return hashlib.sha256("".join(sorted(lines)).encode()).hexdigest()


def make_peer(name: str, suite: SuiteConfig, *, dtype: str, rows: int) -> Any:
    """Load a model with `transformers`, as lm-eval's model `hf`; raises anything: of the network, a file, memory."""
    from lm_eval.api.registry import get_model  # pyright: ignore[reportMissingImports]

    settings = {"pretrained": name, "dtype": dtype, "batch_size": rows, "think_end_token": suite.think_end}
    return get_model("hf")(device="auto", **settings)
