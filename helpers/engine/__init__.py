"""All that touches FlexGen: one process a run, and what starts, limits and stops it."""
