"""How ranks start, meet, form a grid and exchange values."""
