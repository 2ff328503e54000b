"""How good a model is: lm-evaluation-harness and perplexity."""
