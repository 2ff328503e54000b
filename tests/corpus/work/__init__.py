"""Tests of `maxtext_olmo.corpus.work`."""
