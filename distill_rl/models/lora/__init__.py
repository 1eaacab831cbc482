"""Low-rank adapters (`student.lora`): which layers get one, PEFT's layers in a sharded model, the exported adapter.

Only `adapters` and `folder` import peft, inside functions.
"""
