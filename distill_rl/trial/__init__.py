"""`distill-rl try`: two models and a text, without a configuration: a short training with the teacher and one without it,
compared on text that was held out."""
