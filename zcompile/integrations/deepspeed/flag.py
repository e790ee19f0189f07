"""Detects each new DeepSpeed engine whose config has a "zcompile" block. `import zcompile` calls `watch`.

[Note: a config that nothing acts on]
A program that has a "zcompile" block but does not import zcompile must get an error, and not train without zcompile.
Only DeepSpeed can raise this error. DeepSpeed accepts unknown keys at the top of a config, but refuses them in
"zero_optimization". So the block must be in "zero_optimization". If zcompile is imported, it removes the block before
DeepSpeed validates the config. zcompile refuses a block at the top.
"""

import functools
import importlib.abc
import importlib.util
import inspect
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ENGINE = "deepspeed.runtime.engine"
_ZERO_CONFIG = "deepspeed.runtime.zero.config"  # imported by the engine


def watch() -> None:
    """From now on, look for the block in each new engine's config, also if DeepSpeed is not imported yet."""
    if _ENGINE in sys.modules:
        _wrap(sys.modules[_ENGINE])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Import finder for DeepSpeed's engine module: loads it by the other finders, and wraps the engine."""

    asks_others = False  # True while the other finders search; this one then finds nothing, else it would call itself

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
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
    """Wrap `DeepSpeedEngine.__init__` of `module`, to read the engine's config."""
    engine: Any = module.DeepSpeedEngine
    initialize = engine.__init__
    _accept_block(sys.modules[_ZERO_CONFIG].DeepSpeedZeroConfig)
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        """`DeepSpeedEngine.__init__`. Then, if the config enables zcompile, zcompile takes over gathers and reduces."""
        given = signature.bind(self, *args, **kwargs).arguments
        config = getattr(given.get("config_class"), "_param_dict", None) or {}
        zero = config.get("zero_optimization")  # a bool in old configs
        if "zcompile" not in config and not (isinstance(zero, dict) and "zcompile" in zero):
            initialize(self, *args, **kwargs)
            return
        # Imported here, because these modules import Inductor, and most programs have no DeepSpeed engine.
        from zcompile.integrations.deepspeed.config import options_of
        from zcompile.integrations.deepspeed.takeover import Takeover

        options = options_of(config, given.get("model"))  # raises before the engine is made
        initialize(self, *args, **kwargs)
        if options is not None:
            Takeover(self, options)

    engine.__init__ = wrapped


def _accept_block(zero_config: Any) -> None:
    """Let DeepSpeed ignore "zcompile" in "zero_optimization"; if zcompile is enabled, "zero_quantized_weights" too."""
    initialize = zero_config.__init__

    @functools.wraps(initialize)
    def wrapped(self: Any, *args: Any, zcompile: Any = None, **settings: Any) -> None:
        """`DeepSpeedZeroConfig.__init__` without zcompile's settings."""
        if isinstance(zcompile, dict) and zcompile.get("enabled"):
            settings.pop("zero_quantized_weights", None)  # zcompile quantizes instead
        initialize(self, *args, **settings)

    zero_config.__init__ = wrapped
