"""The command line: an application of the library, which sees nothing of it but what any program sees."""
