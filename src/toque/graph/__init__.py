"""A model as a list of ops: the vocabulary, the recorder that models are written against, and the rewriting passes."""
