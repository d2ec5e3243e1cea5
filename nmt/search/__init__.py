"""Search: greedy, beam and sampling over what a model predicts."""
