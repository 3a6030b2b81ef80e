"""Elastic jobs on one machine: a supervisor, the processes of their ranks, the directory in which others find them. No torch but for the store."""
