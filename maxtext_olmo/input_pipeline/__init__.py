"""MaxText's module names for the OLMo data path.

Code written against `maxtext.input_pipeline.olmo_data`, `.olmo_data_grain` and
`.olmo_grain_data_processing` runs against these with `maxtext.` in its imports changed to
`maxtext_olmo.`: the names and call signatures are the same. The implementation is this package's
own; docs/guides/maxtext.md lists the differences.
"""
