"""A DeepSpeed ZeRO-3 engine that trains through zcompile. The profiler's engines know DeepSpeed, too.

`takeover.py` is where to begin. Its notes say what zcompile takes over from DeepSpeed, and what stays DeepSpeed's. What
is used of DeepSpeed that it does not document is listed in docs/private-apis.md.
"""
