"""The Ray actors: thin shells around the engines, the aligner and the evaluator."""
