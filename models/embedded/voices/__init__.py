"""How the embedded voice is made: texts, Flite's speech, latents, and the networks as they are trained."""
