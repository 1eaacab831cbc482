"""Static pages: a run's report, comparisons of evaluated models, the model card."""
