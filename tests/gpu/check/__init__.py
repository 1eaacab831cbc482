"""Shows in one call what works on a GPU and how fast, with only torch, transformers, numpy and safetensors.

`python -m tests.gpu.check`, or `bash launch/gpu_check.sh`. A part is a function in a module of `checks/` (that of
`throughput` is in `bench/gpu/`), called with the device and whether to use tiny sizes; the parts that `--ray` adds are
commands. Each part runs in its own process under a time limit (`process`), so that a part that fails, hangs or crashes
loses only its own result. `parts` lists them; docs/gpu.md explains the page.

    check(device, tiny) -> figures      correctness: raises AssertionError if something is wrong
    measure(device, tiny) -> figures    times and rates: never fails because of a time

If a part's entry sets `takes_budget`, a third argument is the number of seconds that the function may use. Figures are
numbers by name; a list of dicts becomes a table. A function raises `unittest.SkipTest` if this machine cannot run it.
"""
