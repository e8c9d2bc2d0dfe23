"""Code that all commands share: arguments, files, tables, charts, and errors shown in one line."""
