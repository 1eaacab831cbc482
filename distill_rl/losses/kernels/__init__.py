"""Triton kernels of the losses. Importing a module of this folder needs triton; the rest of the package does not."""
