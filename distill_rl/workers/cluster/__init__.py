"""The Ray cluster that workers run on: starting or joining it, and placing, calling and monitoring actors."""
