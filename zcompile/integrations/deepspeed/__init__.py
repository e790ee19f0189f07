"""A DeepSpeed ZeRO-3 engine that trains through zcompile. The profiler's engines know DeepSpeed, too.

Begin with `takeover.py`: its notes list the parts of training that zcompile takes over, and those that stay with
DeepSpeed. docs/private-apis.md lists the undocumented parts of DeepSpeed that are used here.
"""
