"""Tests of maxtext_olmo."""

try:
  import hypothesis
except ImportError:  # The environments of other loaders, which run some of the scripts, lack it.
  pass
else:
  # A busy machine must not fail a test.
  hypothesis.settings.register_profile(
      "patient", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
  )
  hypothesis.settings.load_profile("patient")
