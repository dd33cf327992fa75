"""Scoring text with a model: likelihoods, rolling perplexity and generation, with and without lm-evaluation-harness."""
