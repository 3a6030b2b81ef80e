"""What users may ask for: frozen option groups, each checked as a whole when it is made."""
