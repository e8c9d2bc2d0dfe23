"""What every command shares with its user: arguments, files, tables, and errors of one line."""
