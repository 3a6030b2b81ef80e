"""The JSON of PatrickStar 0.4.6 and of DeepSpeed: a table of its keys (table, ignored), and its reading into frozen settings (read, settings)."""
