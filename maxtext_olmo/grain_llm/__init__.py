"""The Grain LLM iterators, over any Grain source of documents."""
