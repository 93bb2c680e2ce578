"""Load clients for a running server: what `reprise bench` and the scripts in benchmarks/ drive it with."""
