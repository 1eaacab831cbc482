"""What targets cost on their way: from process to process, from a store, from a server."""
