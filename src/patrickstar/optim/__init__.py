"""AdamW and Adam by one definition of every bit, and the optimizer that a session hands out."""
