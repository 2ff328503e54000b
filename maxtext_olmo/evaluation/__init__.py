"""Evaluation of models: tasks of lm-evaluation-harness, and perplexity."""
