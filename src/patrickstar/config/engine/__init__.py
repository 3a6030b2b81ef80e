"""The JSON of PatrickStar 0.4.6 and of DeepSpeed: a table of every key, and its reading into frozen settings.

kinds     what a value may be;  key: a row of the table;  keys_*: the rows, by subject;  table: all of them
scan      a config against the table;  json_file: a config from a file
read      what the keys come to together;  settings, schedules: the frozen result
"""
