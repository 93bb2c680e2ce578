"""Adapters that give other engines our workloads and time them with our code; each is imported only if it is
installed."""
