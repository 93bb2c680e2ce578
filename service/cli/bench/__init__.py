"""Load generator of `reprise bench` and the scripts in benchmarks/: real HTTP clients that parse every event.

benchmarks/loads/raw_client.py parses nothing, so that it can saturate the API process from the same few cores; that is
why both exist.
"""
