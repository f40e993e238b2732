"""A lab for LLM offloading: FlexGen runs as data, tables, plots and answers."""
