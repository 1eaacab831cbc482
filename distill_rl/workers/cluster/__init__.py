"""The Ray cluster that workers run on: starting or joining it, placing, calling and monitoring actors, its nodes under Slurm."""
