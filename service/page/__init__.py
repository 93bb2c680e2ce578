"""The page at /: HTML, CSS and JavaScript modules, served as they are by service/api/http/page.py."""
