"""Lets zcompile gather parameters and reduce gradients for a DeepSpeed ZeRO-3 engine.

Begin with `takeover.py`: its notes list the parts of training that zcompile takes over, and those that remain with
DeepSpeed. docs/private-apis.md lists the undocumented parts of DeepSpeed that are used here.
"""
