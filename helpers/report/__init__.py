"""Tables, plots, and the document to hand in."""
