"""How the embedded models were made and are judged. Nothing that serves imports this package."""
