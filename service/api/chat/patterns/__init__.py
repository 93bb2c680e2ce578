"""Regular expressions of JSON Schema with look-ahead -> equivalent ones without, which llguidance can compile."""
