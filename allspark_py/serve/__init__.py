"""What a server puts between the engine and its clients."""
