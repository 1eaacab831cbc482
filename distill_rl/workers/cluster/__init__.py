"""The Ray cluster that workers run on: joined or started, who may reach it, and one node of it under a scheduler."""
