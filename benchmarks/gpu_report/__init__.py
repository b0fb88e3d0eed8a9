"""Report of the checks and measurements that need a GPU; `scripts/gpu-report` writes it, see README.md in this folder.

Each step is a module of `steps` and runs in a separate process, so that a crash or a hang affects no other step.
`runner` starts and ends the processes, `child` is their main program, and a step records its results with `step.Step`.
`results` keeps the results of all steps in one file, and `words` writes the report from it.
"""
