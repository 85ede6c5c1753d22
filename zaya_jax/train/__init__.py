"""State, step and loop. The room itself can be called: `zaya_jax.train(config)` trains."""

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """Importing a submodule binds the room to the package's name `train`, which is also the public function."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from zaya_jax.train.loop import train

        return train(*args, **options)


sys.modules[__name__].__class__ = _Room
