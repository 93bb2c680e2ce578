"""Several API processes on one port and one engine: a supervisor starts and watches all of them."""
