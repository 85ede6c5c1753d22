"""`python -m zaya_jax.evaluate PATH`: score a model on held-out data, on text files, or on lm-eval's tasks."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zaya_jax.errors import ExitCode, InputError, RunStopped, last_words

_EXAMPLES = """examples:
  python -m zaya_jax.evaluate runs/tiny
  python -m zaya_jax.evaluate exported/ --text book.txt
  python -m zaya_jax.evaluate runs/tiny --tasks hellaswag,arc_easy --limit 100
  python -m zaya_jax.evaluate exported/ --config configs/evals/base.yaml --peer hf:Qwen/Qwen3-4B
  python -m zaya_jax.evaluate --follow runs/mine --tasks hellaswag"""
_JOIN_SECONDS, _PEER_TIMEOUT = 300, 300.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status, see `ExitCode`."""
    options, peers = _parser().parse_args(arguments), None
    try:
        _check(options)
        from zaya_jax.parallel.multihost import join

        peers = join(options.coordinator, options.processes, options.process, _JOIN_SECONDS, _PEER_TIMEOUT)
        from zaya_jax.evaluate.command import evaluate

        evaluate(options)
    except (InputError, RunStopped, KeyboardInterrupt) as error:
        sentence, status = last_words(error)
        if peers is not None:
            peers.leave(sentence, status)  # ends all processes of the job
        print(sentence, file=sys.stderr)
        return status
    return ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m zaya_jax.evaluate", description="Score a model. Without --text, --tasks and --config: the "
        "held-out loss of a run.", epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("path", metavar="PATH", help="RUN_DIR (its newest checkpoint), RUN_DIR@PHASE (the last one of a phase), "
        "RUN_DIR/checkpoints/STEP, or a transformers folder; adapters are merged into their base")  # fmt: skip
    add("--text", nargs="+", default=[], metavar="FILE", help="plain-text files to score")
    add("--tasks", metavar="A,B", help="tasks, groups or tags of lm-eval, with their own settings")
    add("--config", metavar="FILE", help="suite of tasks, such as configs/evals/base.yaml")
    add("--task-folder", type=Path, metavar="FOLDER", help="folder of more tasks, as lm-eval's YAML files")
    add("--limit", type=int, metavar="N", help="score only the first N items of each task, for a trial")
    add("--peer", action="append", default=[], metavar="hf:NAME", help="model to score with transformers in the same "
        "way, such as hf:Qwen/Qwen3-4B; can be given several times")  # fmt: skip
    add("--run-generated-code", action="store_true", help="allow tasks that execute code which the model writes, on "
        "this machine")  # fmt: skip
    add("--follow", action="store_true", help="score each checkpoint of the run PATH as it appears, until "
        "training ends")  # fmt: skip
    add("--poll", type=float, default=30.0, metavar="SECONDS", help="seconds between looks at the run (--follow only; "
        "default: 30)")  # fmt: skip
    add("--output", type=Path, metavar="FILE", help="JSON file to write (default: RUN_DIR/evaluations/NAME-STEP.json; "
        "with --follow, RUN_DIR/evaluations/NAME.jsonl)")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="seed of samples and of examples in prompts (default: 0)")
    add("--dtype", choices=("float32", "bfloat16"), help="dtype to compute tasks and texts in (default: bfloat16 on "
        "GPUs, float32 on CPUs)")  # fmt: skip
    add("--tokenizer", metavar="FOLDER", help="tokenizer to use in place of the model's own")
    add("--batch-tokens", type=int, default=8192, metavar="N", help="tokens of a device in one forward pass (default: "
        "8192)")  # fmt: skip
    add("--batch-rows", type=int, default=16, metavar="N", help="continuations that a device writes at once (default: "
        "16)")  # fmt: skip
    add("--coordinator", metavar="HOST:PORT", help="address of process 0 (default: set by the launcher)")
    add("--processes", type=int, metavar="N", help="number of processes in the job (default: set by the launcher)")
    add("--process", type=int, metavar="I", help="index of this process, from 0 (default: set by the launcher)")
    return parser


def _check(options: argparse.Namespace) -> None:
    """Raise `InputError` for options that do not go together, before jax is imported."""
    tasks = options.tasks is not None or options.config is not None
    if options.tasks is not None and options.config is not None:
        raise InputError("--tasks and --config do not go together: name the tasks in the file, or remove one.")
    for name, value, least in (("limit", options.limit, 1), ("batch-tokens", options.batch_tokens, 1),
                               ("batch-rows", options.batch_rows, 1), ("poll", options.poll, 0)):  # fmt: skip
        if value is not None and value < least:
            raise InputError(f"--{name} is {value}, but must be at least {least}.")
    only: dict[str, Any] = {"--limit": options.limit, "--peer": options.peer, "--task-folder": options.task_folder,
                            "--run-generated-code": options.run_generated_code}  # fmt: skip
    if not tasks and (extra := [name for name, value in only.items() if value]):
        raise InputError(f"{extra[0]} is only for tasks: add --tasks or --config, or remove it.")
    if options.follow and options.peer:
        raise InputError("--peer does not go with --follow: a peer's scores do not change. Remove one.")


if __name__ == "__main__":
    sys.exit(main())
