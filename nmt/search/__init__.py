"""Search: greedy, beam and sampling with the predictions of a model."""
