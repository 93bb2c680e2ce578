"""Building blocks, each written once and used by every family."""
