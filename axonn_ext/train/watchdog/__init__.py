"""Reports about jobs that hang: what each rank waits for, and which rank the others wait for."""
