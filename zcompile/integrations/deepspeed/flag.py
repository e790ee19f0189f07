"""Sees a DeepSpeed engine being made whose config has the flag. `import zcompile` calls `watch`.

[Note: a config that nothing acts on]
Nothing of zcompile runs in a program that does not import it: an entry point that torch loads by itself would also
break `import torch` wherever an editable install has lost its folder. So DeepSpeed has to object. It takes any key at
the top of a config, but none that it does not know in "zero_optimization". There the block is refused by DeepSpeed,
unless zcompile is imported and takes the block out before DeepSpeed looks. zcompile refuses one at the top.
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
    """Look at the config of each DeepSpeed engine that is made from now on, whenever DeepSpeed is imported."""
    if _ENGINE in sys.modules:
        _wrap(sys.modules[_ENGINE])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds DeepSpeed's engine as other finders do, and wraps it when it is loaded."""

    asks_others = False  # while it does, it finds nothing itself

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
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
    engine: Any = module.DeepSpeedEngine
    initialize = engine.__init__
    _accept_block(sys.modules[_ZERO_CONFIG].DeepSpeedZeroConfig)
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        """`DeepSpeedEngine.__init__`, which zcompile takes over from if the config asks for it."""
        given = signature.bind(self, *args, **kwargs).arguments
        config = getattr(given.get("config_class"), "_param_dict", None) or {}
        zero = config.get("zero_optimization")  # a bool in old configs
        if "zcompile" not in config and not (isinstance(zero, dict) and "zcompile" in zero):
            initialize(self, *args, **kwargs)
            return
        # Here and not above: it imports the backend, and that Inductor. Most programs have no DeepSpeed engine.
        from zcompile.integrations.deepspeed.config import options_of
        from zcompile.integrations.deepspeed.takeover import Takeover

        options = options_of(config, given.get("model"))  # refuses before the engine is made
        initialize(self, *args, **kwargs)
        if options is not None:
            Takeover(self, options)

    engine.__init__ = wrapped


def _accept_block(zero_config: Any) -> None:
    """Have DeepSpeed's class of "zero_optimization" take no notice of "zcompile" in it.

    Nor of "zero_quantized_weights" beside it, for which DeepSpeed would build its quantizer: zcompile quantizes.
    """
    initialize = zero_config.__init__

    @functools.wraps(initialize)
    def wrapped(self: Any, *args: Any, zcompile: Any = None, **settings: Any) -> None:
        """`DeepSpeedZeroConfig.__init__`, of all settings but zcompile's."""
        if isinstance(zcompile, dict) and zcompile.get("enabled"):
            settings.pop("zero_quantized_weights", None)
        initialize(self, *args, **settings)

    zero_config.__init__ = wrapped
