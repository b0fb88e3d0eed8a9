"""One report that answers what only a GPU can answer; `scripts/gpu-report` runs it, see README.md beside this file.

Each step is a module of `steps` and runs in a process of its own, so that a crash or a hang costs that step alone.
`runner` starts and ends the processes, `child` is what runs in them, and `step` is what a step records with. `results`
holds what is known so far in one file, and `words` writes the report from it.
"""
