"""One call that shows what works on a GPU and how fast it is, with torch, transformers, numpy and safetensors alone.

`python -m distill_rl.gpu_check`, or `bash launch/gpu_check.sh`. A part is a function in a module of `checks/`, called
with the device and whether to use tiny sizes. It runs in a process of its own under a time limit (`process`), so that a
part that fails, hangs or crashes costs its own result and no other's. `parts` lists them; docs/gpu.md explains the page.

    check(device, tiny) -> figures      correctness: raises AssertionError where something is wrong
    measure(device, tiny) -> figures    times and rates: no time is ever a failure

Where the part's entry says `takes_budget`, a third argument is the seconds that it may use. Figures are numbers by name; a
list of dicts becomes a table. A function raises `unittest.SkipTest` where this machine cannot do what it is to show.
"""
