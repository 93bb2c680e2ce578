"""The networks, their numerics and their processors. Nothing here knows of HTTP, requests or scheduling."""
