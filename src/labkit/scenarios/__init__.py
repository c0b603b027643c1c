"""What chapters run: small models and data of the forum threads, losses to judge, the museum."""
