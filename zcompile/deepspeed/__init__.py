"""The DeepSpeed flag: a ZeRO-3 engine that trains through zcompile. Nothing outside this folder knows DeepSpeed."""
