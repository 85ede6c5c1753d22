"""Prefill, decode and sampling. The room itself can be called: `zaya_jax.generate(model, tokens, n)`."""

import sys
from types import ModuleType
from typing import Any


class _Room(ModuleType):
    """Importing a submodule binds the room to the package's name `generate`, which is also the public function."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        from zaya_jax.generate.decode import generate

        return generate(*args, **options)


sys.modules[__name__].__class__ = _Room
