"""The session that `manage` puts together, and what is done with it beside the step."""
