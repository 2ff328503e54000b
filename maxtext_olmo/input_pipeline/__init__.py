"""MaxText's module names for the OLMo data path.

Code written against `maxtext.input_pipeline.olmo_data`, `.olmo_data_grain` and
`.olmo_grain_data_processing` runs against these with `maxtext.` in its imports changed to
`maxtext_olmo.`: the same names, with the same call signatures. What is behind them is this
package's own; docs/guides/maxtext.md says where the two differ.
"""
