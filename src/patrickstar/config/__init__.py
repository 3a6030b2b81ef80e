"""Options that users may give: frozen groups, each checked as a whole when it is made."""
