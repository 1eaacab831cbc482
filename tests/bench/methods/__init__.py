"""Which method teaches best: many small trainings on equal terms, and the page of their results."""
