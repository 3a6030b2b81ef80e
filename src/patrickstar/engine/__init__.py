"""The interface of the original and of DeepSpeed, over a session."""
