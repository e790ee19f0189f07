"""Compile once, load everywhere: one file with all that a first step compiles, made by one process for every rank.

| file | what it knows |
|---|---|
| `file_format.py` | the bytes of a file: header, parts, checksums, who may write it |
| `fingerprint.py` | what must be the same where a file is made and where it is loaded |
| `aot.py` | torch's ahead-of-time compilation of one graph: the only file that knows it |
| `kernels.py` | native code of Inductor, taken from a file instead of a compiler |
| `program.py` | a compiled model as parts of a file, and back; what must hold at each call |
| `model.py` | `zcompile.compile`: what all ranks decide together at the first call |
| `precompile.py` | `zcompile precompile`: a file made by one process, without the other ranks |
"""
