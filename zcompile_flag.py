"""Sees a DeepSpeed engine being made whose config has the flag. Installed as `zcompile_flag`; needs the standard library alone.

torch imports it (entry point in the group "torch.backends"), so that a run with the flag and without `import zcompile`
does not go on silently in eager ZeRO-3. zcompile imports it too, for those who switch torch's autoload off.
"""

import functools
import importlib.abc
import importlib.util
import inspect
import sys
import warnings

_ENGINE = "deepspeed.runtime.engine"


def watch() -> None:
    """Look at every DeepSpeed engine's config, from now on or from when DeepSpeed is imported."""
    if _ENGINE in sys.modules:
        _wrap(sys.modules[_ENGINE])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds DeepSpeed's engine as the others do, and wraps it when it is loaded."""

    asking = False  # the other finders

    def find_spec(self, name, path=None, target=None):
        """The engine's spec, whose loader also wraps the engine; None for all other modules."""
        if name != _ENGINE or self.asking:
            return None
        self.asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module):
                execute(module)
                _wrap(module)

            spec.loader.exec_module = exec_module
        return spec


def _wrap(module) -> None:
    initialize = getattr(getattr(module, "DeepSpeedEngine", None), "__init__", None)
    if initialize is None or getattr(initialize, "_zcompile", False):
        return
    signature = inspect.signature(initialize)

    @functools.wraps(initialize)
    def wrapped(self, *args, **kwargs):
        """`DeepSpeedEngine.__init__`, which zcompile takes over from if the config asks for it."""
        given = signature.bind(self, *args, **kwargs).arguments
        config = getattr(given.get("config_class"), "_param_dict", None) or {}
        if "zcompile" not in config:
            return initialize(self, *args, **kwargs)
        if "zcompile" not in sys.modules:
            warnings.warn(
                'zcompile: the DeepSpeed config has "zcompile", and the program does not import it. It is imported now; add '
                "`import zcompile` to the program, which also works where torch's autoload is off.",
                stacklevel=2,
            )
        from zcompile.deepspeed.config import options_of
        from zcompile.deepspeed.takeover import attach

        options = options_of(config, given.get("model"))  # refuses before the engine is made
        initialize(self, *args, **kwargs)
        if options is not None:
            attach(self, options)

    wrapped._zcompile = True
    module.DeepSpeedEngine.__init__ = wrapped
