"""What runs in the notebook's Python process."""
