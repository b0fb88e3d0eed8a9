"""Where this process is: its main thread's stack, torch's collectives, and what to do when it cannot go on.

Other ranks ask while they wait for this one. A thread beside the training script looks; it loads no torch, and looks at
torch only where the script has loaded it. How the question comes and the answer leaves belongs in `client.connection`.
"""
