"""The supervisor, whose file system does not answer while the file `SILENT` exists: a new file's name waits."""

import os
import sys
import time

from zaya_jax.aegis.__main__ import main


def _replace(*names, replace=os.replace, **folders):
    while os.path.exists(os.environ["SILENT"]):
        time.sleep(0.01)
    replace(*names, **folders)


if __name__ == "__main__":
    os.replace = _replace
    sys.exit(main())
