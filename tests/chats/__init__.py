"""Chat templates with the constructs of public model families, kinds of chats, and what must be learnt from each pair."""
