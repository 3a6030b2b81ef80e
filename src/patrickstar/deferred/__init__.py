"""Models built without memory for their parameters."""
