"""`python -m zaya_jax.evaluate PATH`: score a model on held-out data, on text files, or on lm-eval's tasks."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from zaya_jax.config.checks import require
from zaya_jax.errors import InputError, RunStopped, exit_message
from zaya_jax.hardware.detection import select_preset
from zaya_jax.hardware.environment import keep_compilations
from zaya_jax.run.command_output import prepare_streams, run_command
from zaya_jax.run.options import MODEL_PATH, add_job
from zaya_jax.run.parser import Parser

_EXAMPLES = """examples:
  python -m zaya_jax.evaluate runs/tiny
  python -m zaya_jax.evaluate exported/ --text book.txt
  python -m zaya_jax.evaluate runs/tiny --tasks hellaswag,arc_easy --limit 100
  python -m zaya_jax.evaluate exported/ --config configs/evals/base.yaml --peer hf:Qwen/Qwen3-4B
  python -m zaya_jax.evaluate --follow runs/mine --tasks hellaswag"""
_DEFAULTS = {"seed": 0, "batch_tokens": 8192, "batch_rows": 16}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see `ExitCode`."""
    parser = _parser()
    options = parser.parse_args(arguments)

    def run() -> None:
        _check(options, parser.get_default)
        keep_compilations()
        from zaya_jax.job.multihost import join

        preset = select_preset(None)
        flags = (options.coordinator, options.processes, options.process)
        peers = join(flags, preset.join_seconds, preset.peer_timeout)
        from zaya_jax.evaluate.evaluate_command import evaluate

        try:
            evaluate(options)
        except (InputError, RunStopped, KeyboardInterrupt, OSError) as error:
            if peers is not None:
                peers.leave(*exit_message(error))  # ends all processes of the job
            raise

    return run_command(run)


def _parser() -> Parser:
    description = "Score a model. Without --text, --tasks and --config: the held-out loss of a run."
    parser = Parser(prog="python -m zaya_jax.evaluate", description=description, epilog=_EXAMPLES)
    flag, number = parser.add_argument, {"type": int, "metavar": "N"}
    flag("path", metavar="PATH", help=MODEL_PATH)
    flag("--text", nargs="+", default=[], metavar="FILE", help="plain-text files to score")
    flag("--tasks", metavar="A,B", help="tasks, groups or tags of lm-eval, with their own settings")
    flag("--config", metavar="FILE", help="suite of tasks, such as configs/evals/base.yaml")
    flag("--task-folder", type=Path, metavar="FOLDER", help="folder of more tasks, as lm-eval's YAML files")
    flag("--limit", help="score only the first N items of each task, for a trial", **number)
    text = "model to score with transformers in the same way, such as hf:Qwen/Qwen3-4B; can be given several times"
    flag("--peer", action="append", default=[], metavar="hf:NAME", help=text)
    text = "allow tasks that execute code which the model writes, on this machine"
    flag("--run-generated-code", action="store_true", help=text)
    text = "score each checkpoint of the run PATH as it appears, until training ends"
    flag("--follow", action="store_true", help=text)
    name = "NAME is heldout, or what is scored (the name of the --config file, else the tasks) and 8 digits of a sha256"
    default = "RUN_DIR/evaluations/NAME-STEP.json; with --follow, RUN_DIR/evaluations/NAME.jsonl"
    text = f"JSON file to write (default: {default}). {name} of all settings that change a score"
    flag("--output", type=Path, metavar="FILE", help=text)
    flag("--seed", help="seed of samples and of examples in prompts (tasks only; default: 0)", **number)
    text = "dtype to compute tasks and texts in (default: bfloat16 on GPUs, float32 on CPUs)"
    flag("--dtype", choices=("float32", "bfloat16"), help=text)
    flag("--tokenizer", metavar="FOLDER", help="tokenizer to use in place of the model's own")
    text = "tokens of a device in one forward pass (tasks and texts only; default: 8192)"
    flag("--batch-tokens", help=text, **number)
    flag("--batch-rows", help="continuations that a device writes at once (tasks only; default: 16)", **number)
    add_job(parser)
    return parser


def _check(options: argparse.Namespace, unset: Callable[[str], object]) -> None:
    """Raise `InputError` for options that do not go together; else set defaults. `unset` has the values before that."""
    tasks = options.tasks is not None or options.config is not None
    if options.tasks is not None and options.config is not None:
        raise InputError("--tasks and --config do not go together: name the tasks in the file, or remove one.")
    for name in ("limit", "batch_tokens", "batch_rows"):
        value = getattr(options, name)
        require(value is None or value >= 1, f"--{name.replace('_', '-')}", value, "at least 1")
    for_tasks = ("limit", "peer", "task_folder", "run_generated_code", "seed", "batch_rows")
    heldout = "since held-out data is scored as in training: add --tasks, --config or --text"
    rules = [
        (tasks, for_tasks, "is only for tasks: add --tasks or --config"),
        (tasks or options.text, ("dtype", "tokenizer", "batch_tokens"), f"is only for tasks and texts, {heldout}"),
    ]
    for allowed, names, reason in rules:
        extra = [name for name in names if getattr(options, name) != unset(name)]
        if extra and not allowed:
            raise InputError(f"--{extra[0].replace('_', '-')} {reason}, or remove it.")
    if options.follow and options.peer:
        raise InputError("--peer does not go with --follow: a peer's scores do not change. Remove one.")
    for name, value in _DEFAULTS.items():
        if getattr(options, name) is None:
            setattr(options, name, value)


if __name__ == "__main__":
    prepare_streams()
    sys.exit(main())
