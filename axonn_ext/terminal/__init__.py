"""What all commands share: arguments, files, tables, and errors that are shown in one line."""
