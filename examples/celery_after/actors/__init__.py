"""This deployment's actors."""
