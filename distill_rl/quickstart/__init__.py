"""The quickstart: offline material, a distillation run, its control, and a table that compares them."""
