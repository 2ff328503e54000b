"""MaxText's module names for the OLMo data path.

To run code that imports `maxtext.input_pipeline.olmo_data`, `.olmo_data_grain` or
`.olmo_grain_data_processing`, change `maxtext.` to `maxtext_olmo.` in its imports. Names and call
signatures are the same, but this package has its own implementation: docs/guides/maxtext.md lists
the differences.
"""
