"""Getting a machine ready: packages, Colab, checks."""
