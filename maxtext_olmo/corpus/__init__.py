"""What tokens are there: mix manifests, the index over token files, reading and verifying them."""
