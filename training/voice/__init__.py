"""How the embedded voice is made: texts, Flite's speech, latents, networks, gates."""
