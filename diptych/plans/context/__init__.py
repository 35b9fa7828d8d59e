"""Context parallelism: which tokens a rank has, and what ranks exchange."""
