"""Predictions of memory and time from settings alone: nothing here runs a model."""
