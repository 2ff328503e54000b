"""The seed's Grain LLM iterators, over any Grain source of documents."""
