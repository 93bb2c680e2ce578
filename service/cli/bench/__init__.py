"""Load generator of `reprise bench` and the scripts in benchmarks/: real HTTP clients that parse every event."""
