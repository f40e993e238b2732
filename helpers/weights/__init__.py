"""Weights in FlexGen's layout: from the hub, from a local folder, or synthetic."""
