"""The process of `compiled.run_worker`: `python -m zaya_jax.machine.compilers.worker`.

It reads a pickled function from its input, calls it, and prints what it returns as JSON.
"""

import json
import os
import pickle
import resource
import sys

from zaya_jax.data.convert import end_with_parent


def main() -> None:
    """Call the function; this process ends with the one that started it."""
    end_with_parent(os.getppid())
    result = pickle.load(sys.stdin.buffer)()  # noqa: S301 (of the process that started this one)
    print(json.dumps(result | {"host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))


if __name__ == "__main__":
    main()
