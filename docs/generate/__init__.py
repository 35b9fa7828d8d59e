"""Scripts that write pages and pictures of the documentation."""
