"""Sees a DeepSpeed engine being made whose config has the flag. Installed as `zcompile_flag`.

torch imports this module (entry point in the group "torch.backends"), so it needs nothing but the standard library.
Why: a run with the flag and without `import zcompile` would go on silently in eager ZeRO-3. zcompile imports it too,
for those who switch torch's autoload off.
"""

import functools
import importlib.abc
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ENGINE = "deepspeed.runtime.engine"


def watch() -> None:
    """Look at every DeepSpeed engine's config, from now on or from when DeepSpeed is imported."""
    if _ENGINE in sys.modules:
        _wrap(sys.modules[_ENGINE])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds DeepSpeed's engine as other finders do, and wraps it when it is loaded."""

    asks_others = False  # while it does, it finds nothing itself

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The engine's spec, whose loader also wraps the engine; None for all other modules."""
        if name != _ENGINE or self.asks_others:
            return None
        self.asks_others = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asks_others = False
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                _wrap(module)

            loader.exec_module = exec_module
        return spec


def _wrap(module: ModuleType) -> None:
    """Have `DeepSpeedEngine.__init__` of `module` look at its config."""
    engine: Any = getattr(module, "DeepSpeedEngine", None)
    initialize: Any = getattr(engine, "__init__", None)
    if engine is None or getattr(initialize, "_zcompile", False):
        return
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        """`DeepSpeedEngine.__init__`, which zcompile takes over from if the config asks for it."""
        given = signature.bind(self, *args, **kwargs).arguments
        config = getattr(given.get("config_class"), "_param_dict", None) or {}
        if "zcompile" not in config:
            initialize(self, *args, **kwargs)
            return
        if "zcompile" not in sys.modules:
            warnings.warn(
                'zcompile: the DeepSpeed config has "zcompile", and the program does not import it. It is imported '
                "now; add `import zcompile` to the program, which also works where torch's autoload is off.",
                stacklevel=2,
            )
        # Here and not above: torch imports this module before it can be imported itself.
        from zcompile.deepspeed.config import options_of
        from zcompile.deepspeed.takeover import attach

        options = options_of(config, given.get("model"))  # refuses before the engine is made
        initialize(self, *args, **kwargs)
        if options is not None:
            attach(self, options)

    marked: Any = wrapped
    marked._zcompile = True
    engine.__init__ = wrapped
