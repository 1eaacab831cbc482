"""What runs a model on questions: Transformers and vLLM."""
