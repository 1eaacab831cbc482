GPUS_PER_NODE = 8
"""GPUs of a cluster's node, unless `slurm.gpus_per_node` or an option says otherwise. Here, because `--help` names it."""
