"""What people copy: each file runs as it is."""
