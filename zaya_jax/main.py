"""Train: `python -m zaya_jax.main --config configs/tiny.yaml [section.key=value ...]`."""

import argparse
import sys
from collections.abc import Sequence

from zaya_jax.config import load_config, to_yaml
from zaya_jax.errors import InputError, RunStopped


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status is 0, 2 for bad input, 1 for a run that had to stop, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m zaya_jax.main", description="Train a ZAYA1 model.")
    parser.add_argument("--config", required=True, metavar="FILE", help="a configuration, such as configs/tiny.yaml")
    parser.add_argument("--print-config", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="values that override the file's")
    given = parser.parse_args(arguments)
    try:
        config = load_config(given.config, given.overrides)
        if given.print_config:
            print(to_yaml(config), end="")
            return 0
        from zaya_jax.train.loop import train
        from zaya_jax.train.report import report

        print(report(config, train(config)))
    except InputError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted: the same command goes on from the last checkpoint.", file=sys.stderr)
        return 130
    except RunStopped as error:
        print(f"Stopped: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
