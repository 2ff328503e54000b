"""Which instance comes at which position: permutations, batch schedules, splits, samplers."""
