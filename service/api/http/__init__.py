"""HTTP itself: connections, middleware, authentication, errors and streams."""
