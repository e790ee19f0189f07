"""Sees a DeepSpeed engine being made whose config has the flag. `import zcompile` calls `watch`.

[Note: a config that nothing acts on]
Nothing of zcompile runs in a program that does not import it: an entry point that torch loads by itself would also
break `import torch` wherever an editable install has lost its folder. So DeepSpeed has to object. It takes any key at
the top of a config, but none that it does not know in "zero_optimization". There the block is refused by DeepSpeed,
unless zcompile is imported and takes the block out before DeepSpeed looks.

A block at the top of the config works too, but without the import DeepSpeed says nothing. If the import comes after
`deepspeed.initialize`, it warns of the engines that are there.
"""

import functools
import gc
import importlib.abc
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_ENGINE = "deepspeed.runtime.engine"
_ZERO_CONFIG = "deepspeed.runtime.zero.config"  # imported by the engine


def watch() -> None:
    """Look at the config of each DeepSpeed engine that is made from now on, whenever DeepSpeed is imported."""
    if _ENGINE in sys.modules:
        _wrap(sys.modules[_ENGINE])
        _warn_of_engines(sys.modules[_ENGINE])
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
    _accept_block(getattr(sys.modules.get(_ZERO_CONFIG), "DeepSpeedZeroConfig", None))
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        """`DeepSpeedEngine.__init__`, which zcompile takes over from if the config asks for it."""
        given = signature.bind(self, *args, **kwargs).arguments
        config = getattr(given.get("config_class"), "_param_dict", None) or {}
        if not _blocks(config):
            initialize(self, *args, **kwargs)
            return
        # Here and not above: it imports the backend, and that Inductor. Most programs have no DeepSpeed engine.
        from zcompile.integrations.deepspeed.config import options_of
        from zcompile.integrations.deepspeed.takeover import Takeover

        options = options_of(config, given.get("model"))  # refuses before the engine is made
        initialize(self, *args, **kwargs)
        if options is not None:
            Takeover(self, options)

    marked: Any = wrapped
    marked._zcompile = True
    engine.__init__ = wrapped


def _accept_block(zero_config: Any) -> None:
    """Have DeepSpeed's class of "zero_optimization" take no notice of "zcompile" in it."""
    if zero_config is None:
        return
    initialize = zero_config.__init__

    @functools.wraps(initialize)
    def wrapped(self: Any, *args: Any, zcompile: Any = None, **settings: Any) -> None:
        """`DeepSpeedZeroConfig.__init__`, of all settings but zcompile's."""
        initialize(self, *args, **settings)

    zero_config.__init__ = wrapped


def _warn_of_engines(module: ModuleType) -> None:
    """Warn if an engine was made whose config has the flag, before anything could act on it."""
    engine = getattr(module, "DeepSpeedEngine", ())
    # Not isinstance: it asks objects for their `__class__`, and proxies do anything then.
    engines = [thing for thing in gc.get_objects() if issubclass(type(thing), engine)]
    for made in engines:
        blocks = _blocks(getattr(getattr(made, "_config", None), "_param_dict", None) or {})
        enabled = any(isinstance(block, Mapping) and block.get("enabled") for block in blocks)
        if enabled and not hasattr(made, "zcompile"):
            warnings.warn(
                'zcompile: a DeepSpeed engine has "zcompile" in its config, but was made before `import zcompile`. It '
                "trains in eager ZeRO-3. Import zcompile before deepspeed.initialize.",
                stacklevel=3,
            )
            return


def _blocks(config: Mapping[str, Any]) -> list[Any]:
    """What a DeepSpeed config says of zcompile, at its top and in "zero_optimization"."""
    places = (config, config.get("zero_optimization"))
    return [place["zcompile"] for place in places if isinstance(place, Mapping) and "zcompile" in place]
