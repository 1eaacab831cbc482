"""One batch on its way through aligners, teachers and student, and what happens when a worker fails."""
