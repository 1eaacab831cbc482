"""The data of the suites: finding files, reading rows, and facts about the published data."""
