"""A teacher that a server runs: token ids go out over HTTP, log-probabilities come back.

client     HTTP: several servers, a bound on requests in flight, retries, deadlines, the token
dialects   what each kind of server is asked and how it answers
answers    from an answer's entries to `Scores`, with all checks
scorer     the `PromptScorer`: prompts → requests → scores
token      the server's token from the environment
probe      what a server can do, found out before a run starts
"""
