"""Suites: files that name lm-eval tasks and how to run them, such as `configs/evals/base.yaml`."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from zaya_jax.config.checks import require
from zaya_jax.config.loader import load_as
from zaya_jax.generate.sampling import Sampling


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
