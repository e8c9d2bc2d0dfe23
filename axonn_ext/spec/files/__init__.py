"""Reads what users wrote in files, and says in one way what is wrong with it."""
