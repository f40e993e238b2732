"""A laboratory for LLM offloading: FlexGen runs as data, tables, plots and answers."""
