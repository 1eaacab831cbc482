"""What gives a teacher's targets besides a model in this process: a store, or a model that another program serves."""
