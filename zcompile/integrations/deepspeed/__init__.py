"""A DeepSpeed ZeRO-3 engine that trains through zcompile. The profiler's engines know DeepSpeed, too.

`takeover.py` is where to begin. Its notes say what zcompile takes over from DeepSpeed, and what stays DeepSpeed's.

| file | job |
|---|---|
| flag.py | sees an engine being made whose config has the block |
| config.py | the "zcompile" block of a DeepSpeed config; what else in a config is refused |
| takeover.py | takes an engine over and gives it back; what may fail, and what happens then |
| leaf_modules.py | DeepSpeed's leaf modules, which are units |
| hooks.py | DeepSpeed's module and gradient hooks: removed, restored; what runs around a forward |
| partitions.py | one ZeRO-3 parameter as a sharded parameter |
| optimizer_step.py | the optimizer's step without copies of gradients and main parameters |
| gradients.py | where gradients lie between backward and step, and their squares |
| sub_groups.py | one flat main parameter, updated parameter by parameter |

What is used of DeepSpeed that it does not document is listed in docs/private-apis.md.
"""
