"""Code that all commands share: arguments, files, tables, and errors shown in one line."""
