"""Everything that touches FlexGen: one process per run, and the code that starts, limits and stops it."""
