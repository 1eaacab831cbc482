"""The quickstart and `distill-rl try`: trainings in child processes, compared with each other in a table.

The quickstart makes models and data offline, and compares a distillation with its control. `try` takes two models and a
text without a configuration, and compares a short training with the teacher and one without it on text that was held out.
"""
