"""Reports on hanging jobs: what each rank waits for, and which rank holds up the others."""
